use super::*;

fn head(text: &str) -> io::Result<Option<Head>> {
    Head::parse(&mut BytesMut::from(text))
}

/// Reads a body that comes in pieces of `size` bytes; what it holds, and whether it has ended.
fn body(head_text: &str, bytes: &[u8], size: usize) -> io::Result<(String, bool)> {
    let mut framing = head(head_text)?.expect("a whole head").framing;
    let mut buffer = BytesMut::new();
    let mut text = Vec::new();
    for piece in bytes.chunks(size) {
        buffer.extend_from_slice(piece);
        text.extend_from_slice(&framing.take(&mut buffer)?);
    }
    Ok((String::from_utf8(text).expect("text"), framing == Framing::Ended))
}

#[test]
fn heads_say_what_matters() {
    let text = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/event-stream; charset=utf-8\r\nretry-after: 3\r\nX-Microserving-Relay: 1\r\nContent-Length: 5\r\n\r\n";
    let parsed = head(text).expect("a head").expect("whole");
    assert_eq!((parsed.status, parsed.is_event_stream, parsed.keep_alive), (503, true, true));
    assert_eq!((parsed.retry_after, parsed.relay.as_deref()), (Some(Duration::from_secs(3)), Some("1")));
    assert!(!parsed.is_success());
    assert_eq!(parsed.framing, Framing::Length(5));
    for len in 0..text.len() {
        assert!(head(&text[..len]).expect("not wrong yet").is_none(), "{len}");
    }
}

#[test]
fn connections_are_used_again_only_if_both_sides_say_so() {
    for (text, again) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", true),
        ("HTTP/1.1 200 OK\r\nConnection: Close\r\ncontent-length: 0\r\n\r\n", false),
        ("HTTP/1.1 200 OK\r\nconnection: x, close\r\n\r\n", false),
        ("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", false),
    ] {
        assert_eq!(head(text).expect("a head").expect("whole").keep_alive, again, "{text}");
    }
}

#[test]
fn bodies_end_where_their_framing_says_however_they_are_cut() {
    let chunks = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let whole = b"5\r\nhello\r\nA;x=1\r\n, world\r\n!\r\n0\r\nt: 1\r\n\r\n";
    for size in 1..=whole.len() {
        assert_eq!(body(chunks, whole, size).expect("a body"), ("hello, world\r\n!".into(), true), "{size}");
    }
    assert_eq!(
        body(chunks, &whole[..whole.len() - 2], 3).expect("so far"),
        ("hello, world\r\n!".into(), false)
    );
    let length = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n";
    assert_eq!(body(length, b"hello", 2).expect("a body"), ("hello".into(), true));
    assert_eq!(body(length, b"hell", 2).expect("so far"), ("hell".into(), false));
    assert_eq!(
        body("HTTP/1.1 200 OK\r\n\r\n", b"all of it", 4).expect("so far"),
        ("all of it".into(), false)
    );
    assert_eq!(body("HTTP/1.1 204 No\r\n\r\n", b"", 1).expect("none").0, "");
}

#[test]
fn what_is_no_http_is_an_error() {
    for text in [
        "SSH-2.0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
    ] {
        assert!(head(text).is_err(), "{text}");
    }
    let chunks = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    for bytes in [&b"x\r\n"[..], b"-1\r\n", b"+1\r\na\r\n", b"\r\n", b"1\r\nab\r\n", b"fffffffffffffffff\r\n"]
    {
        assert!(body(chunks, bytes, 1).is_err(), "{:?}", String::from_utf8_lossy(bytes));
    }
    assert!(body(chunks, &[b'1'; 5000], 5000).is_err());
}
