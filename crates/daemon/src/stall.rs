//! A connection whose peer reads nothing for too long is given up.
//!
//! A client that stops reading would otherwise keep its connection, and what is still to be written to it, for ever: the
//! kernel acknowledges keep-alives on its behalf as long as its machine is up.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream whose writes fail once one of them has been waiting for `patience`. Reads may wait for ever.
///
/// Bytes that were read too early can be put back.
#[derive(Debug)]
pub(crate) struct StallGuard<S> {
    stream: S,
    patience: Duration,
    put_back: Vec<u8>,
    /// Runs while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> StallGuard<S> {
    pub(crate) fn new(stream: S, patience: Duration) -> Self {
        Self { stream, patience, put_back: Vec::new(), stalled: None }
    }

    /// Lets the next reads begin with `bytes`, which were read from here.
    pub(crate) fn put_back(&mut self, bytes: &[u8]) {
        self.put_back.splice(..0, bytes.iter().copied());
    }

    fn watch<T>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stalled = None;
            return outcome;
        }
        let patience = self.patience;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer reads nothing")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.put_back.is_empty() {
            let len = self.put_back.len().min(buffer.remaining());
            buffer.put_slice(&self.put_back[..len]);
            self.put_back.drain(..len);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(context, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_late_is_waited_for_and_one_that_never_reads_is_not() {
        let (ours, mut theirs) = duplex(4);
        let mut guarded = StallGuard::new(ours, Duration::from_secs(60));
        guarded.write_all(b"1234").await.unwrap();
        let late = tokio::spawn(async move {
            sleep(Duration::from_secs(59)).await;
            let mut bytes = [0; 4];
            theirs.read_exact(&mut bytes).await.unwrap();
            theirs
        });
        guarded.write_all(b"5678").await.unwrap();
        let _still_open = late.await.unwrap();
        let error = guarded.write_all(b"9").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
