//! Plain calls and timed streams over HTTP, one connection a call.

use std::io::{BufRead as _, BufReader};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Longest any single call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(300);

/// An answer that was read whole.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// Header names in lower case, with values.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: String,
}

impl Answer {
    /// Parses the body.
    ///
    /// # Errors
    /// If the status is not 200 or the body is not the JSON expected.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        if self.status != 200 {
            bail!("status {}: {}", self.status, self.body);
        }
        serde_json::from_str(&self.body).with_context(|| format!("unexpected body: {}", self.body))
    }

    /// Returns a header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

fn agent(timeout: Duration) -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(timeout))
        .max_idle_connections(0)
        .build()
        .into()
}

fn headers_of(response: &ureq::http::Response<ureq::Body>) -> Vec<(String, String)> {
    let text = |value: &ureq::http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    response.headers().iter().map(|(name, value)| (name.as_str().to_owned(), text(value))).collect()
}

fn whole(mut response: ureq::http::Response<ureq::Body>) -> Result<Answer> {
    let status = response.status().as_u16();
    let headers = headers_of(&response);
    let body = response.body_mut().read_to_string().context("cannot read the answer")?;
    Ok(Answer { status, headers, body })
}

/// Returns only the status of a GET; short time limit.
///
/// # Errors
/// If nobody answers.
pub fn status(url: &str) -> Result<u16> {
    Ok(agent(Duration::from_secs(2)).get(url).call()?.status().as_u16())
}

/// Gets a URL.
///
/// # Errors
/// If nobody answers; an error status is an [`Answer`].
pub fn get(url: &str) -> Result<Answer> {
    whole(agent(CALL_TIMEOUT).get(url).call().with_context(|| format!("GET {url}"))?)
}

/// Sends JSON by any method, or nothing by one that takes no body.
///
/// # Errors
/// If nobody answers; an error status is an [`Answer`].
pub fn send(method: &str, url: &str, headers: &[(&str, &str)], body: Option<&Value>) -> Result<Answer> {
    let mut request = ureq::http::Request::builder().method(method).uri(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let context = || format!("{method} {url}");
    let agent = agent(CALL_TIMEOUT);
    let response = match body {
        None => agent.run(request.body(()).with_context(context)?),
        Some(body) => {
            let request = request.header("content-type", "application/json");
            agent.run(request.body(body.to_string()).with_context(context)?)
        }
    };
    whole(response.with_context(context)?)
}

/// Sends any bytes by POST.
///
/// # Errors
/// If nobody answers; an error status is an [`Answer`].
pub fn post_bytes(url: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<Answer> {
    let mut request = agent(CALL_TIMEOUT).post(url).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    whole(request.send(body).with_context(|| format!("POST {url}"))?)
}

/// Sends JSON by POST.
///
/// # Errors
/// If nobody answers; an error status is an [`Answer`].
pub fn post(url: &str, headers: &[(&str, &str)], body: &Value) -> Result<Answer> {
    post_bytes(url, headers, body.to_string().as_bytes())
}

/// Sends JSON by PUT.
///
/// # Errors
/// If nobody answers; an error status is an [`Answer`].
pub fn put(url: &str, body: &Value) -> Result<Answer> {
    let request = agent(CALL_TIMEOUT).put(url).header("content-type", "application/json");
    whole(request.send(body.to_string().as_bytes()).with_context(|| format!("PUT {url}"))?)
}

/// Sends any bytes by PUT.
///
/// # Errors
/// If nobody answers; an error status is an [`Answer`].
pub fn put_bytes(url: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<Answer> {
    let mut request = agent(CALL_TIMEOUT).put(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    whole(request.send(body).with_context(|| format!("PUT {url}"))?)
}

/// Sends a DELETE.
///
/// # Errors
/// If nobody answers; an error status is an [`Answer`].
pub fn delete(url: &str) -> Result<Answer> {
    whole(agent(CALL_TIMEOUT).delete(url).call().with_context(|| format!("DELETE {url}"))?)
}

/// A server-sent-event stream that is being read.
pub struct EventStream {
    /// The status code; the body is an error if it is not 200.
    pub status: u16,
    /// Header names in lower case, with values.
    pub headers: Vec<(String, String)>,
    lines: std::io::Lines<BufReader<ureq::BodyReader<'static>>>,
    done: bool,
}

impl std::fmt::Debug for EventStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventStream")
            .field("status", &self.status)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl EventStream {
    /// Returns the next event's JSON, or nothing after `[DONE]`.
    ///
    /// Dropping the stream closes the connection, which cancels the request.
    ///
    /// # Errors
    /// If the connection breaks, ends before `[DONE]`, or carries anything but `data:` lines.
    pub fn next_event(&mut self) -> Result<Option<Value>> {
        if self.done {
            return Ok(None);
        }
        for line in self.lines.by_ref() {
            let line = line.context("the stream broke")?;
            if line.is_empty() {
                continue;
            }
            let data = line.strip_prefix("data: ").with_context(|| format!("not a data line: {line}"))?;
            if data == "[DONE]" {
                self.done = true;
                return Ok(None);
            }
            return Ok(Some(serde_json::from_str(data).with_context(|| format!("not JSON: {data}"))?));
        }
        bail!("the stream ended without [DONE]")
    }
}

/// Sends JSON by POST and reads the answer as events.
///
/// # Errors
/// If nobody answers, or the answer is an error status (its body is in the message).
pub fn post_stream(url: &str, headers: &[(&str, &str)], body: &Value) -> Result<EventStream> {
    let mut request = agent(CALL_TIMEOUT).post(url).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send(body.to_string().as_bytes()).with_context(|| format!("POST {url}"))?;
    let status = response.status().as_u16();
    let headers = headers_of(&response);
    if status != 200 {
        bail!("POST {url}: status {status}: {}", whole(response)?.body);
    }
    let reader = BufReader::new(response.into_body().into_reader());
    Ok(EventStream { status, headers, lines: reader.lines(), done: false })
}

/// A stream that was read to its end, with the times that matter.
#[derive(Clone, Debug, Default)]
pub struct Timed {
    /// The text of choice 0.
    pub text: String,
    /// The token ids of choice 0, if the request asked for them.
    pub token_ids: Vec<u32>,
    /// From sending the request to the first chunk with text or a token.
    pub ttft: Duration,
    /// From the first token to the last, per token after the first.
    pub tpot: Duration,
    /// From sending the request to the end.
    pub jct: Duration,
    /// The last chunk's `usage`.
    pub usage: Value,
    /// The last chunk's `microserving` object, if the request asked for it.
    pub stats: Value,
    /// The finish reason of choice 0.
    pub finish_reason: Option<String>,
}

/// Sends a completion or chat request with `stream: true`, reads it to its end, and calls `each` with every piece of text.
///
/// # Errors
/// If the request fails, or an event carries an error.
pub fn timed_stream(
    url: &str,
    headers: &[(&str, &str)],
    body: &Value,
    mut each: impl FnMut(&str),
) -> Result<Timed> {
    let mut body = body.clone();
    body["stream"] = true.into();
    if body.get("stream_options").is_none() {
        body["stream_options"] = serde_json::json!({"include_usage": true});
    }
    let start = Instant::now();
    let mut stream = post_stream(url, headers, &body)?;
    let mut timed = Timed::default();
    let mut first = None;
    let mut last = start;
    while let Some(event) = stream.next_event()? {
        if let Some(error) = event.get("error") {
            bail!("the stream carries an error: {error}");
        }
        for key in ["usage", "microserving"] {
            if let Some(value) = event.get(key).filter(|value| !value.is_null()) {
                *(if key == "usage" { &mut timed.usage } else { &mut timed.stats }) = value.clone();
            }
        }
        let Some(choice) = event.pointer("/choices/0").filter(|choice| choice["index"] == 0) else {
            continue;
        };
        if let Some(reason) = choice["finish_reason"].as_str() {
            timed.finish_reason = Some(reason.to_owned());
        }
        let text = choice
            .pointer("/delta/content")
            .or_else(|| choice.get("text"))
            .and_then(Value::as_str)
            .unwrap_or("");
        let ids = choice.get("token_ids").and_then(Value::as_array);
        let ids = ids.into_iter().flatten().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok());
        let before = timed.token_ids.len();
        timed.token_ids.extend(ids);
        if !text.is_empty() || timed.token_ids.len() > before {
            last = Instant::now();
            first.get_or_insert(last);
            timed.text.push_str(text);
            each(text);
        }
    }
    timed.jct = start.elapsed();
    let first = first.unwrap_or(last);
    timed.ttft = first - start;
    let num_tokens = timed.usage["completion_tokens"].as_u64().unwrap_or(timed.token_ids.len() as u64);
    let rest = u32::try_from(num_tokens.saturating_sub(1)).unwrap_or(u32::MAX);
    timed.tpot = if rest == 0 { Duration::ZERO } else { (last - first) / rest };
    Ok(timed)
}
