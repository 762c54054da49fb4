//! What front and worker say of steps, on a stream of its own: one exchange a call, and layers told in between.
//!
//! ```text
//! front ── Forward(items) ──▶ worker          the need of each sampler goes over, the sampler stays
//!       ◀── Layer(0), Layer(1) … ──           only if an item is sent: its puts go over the other stream
//!       ◀── Stepped(found) ──                 as much of each row of logits as was needed
//! ```

use std::time::Duration;

use microserving_executor::{Batch, ExecutorError, Found, LogitNeed, SampleError};
use microserving_protocol::{LayerId, PageId, TokenId};

use crate::wire::{In, Malformed, Out};

/// Kinds of frames.
pub(crate) const FORWARD: u8 = 1;
pub(crate) const IMPORT: u8 = 2;
pub(crate) const EXPORT: u8 = 3;
pub(crate) const ATTACH: u8 = 4;
pub(crate) const LAYER: u8 = 5;
pub(crate) const STEPPED: u8 = 6;
pub(crate) const DONE: u8 = 7;
pub(crate) const FAILED: u8 = 8;

/// What is needed of an item's logits; `None` if nothing is drawn.
fn put_need(out: &mut Out, need: Option<LogitNeed>) {
    match need {
        None => out.u8(0),
        Some(LogitNeed::Best) => out.u8(1),
        Some(LogitNeed::Kept { temperature, top_k, top_p }) => {
            out.u8(2).f32(temperature).u32(top_k).f32(top_p)
        }
        Some(LogitNeed::All) => out.u8(3),
    };
}

fn take_need(body: &mut In<'_>) -> Result<Option<LogitNeed>, Malformed> {
    Ok(match body.u8()? {
        0 => None,
        1 => Some(LogitNeed::Best),
        2 => {
            let (temperature, top_k, top_p) = (body.f32()?, body.u32()?, body.f32()?);
            Some(LogitNeed::Kept { temperature, top_k, top_p })
        }
        3 => Some(LogitNeed::All),
        _ => return Err(Malformed("no such need of logits")),
    })
}

/// Writes a batch.
pub(crate) fn put_batch(out: &mut Out, batch: &Batch<'_>, vocab_size: u32) {
    out.list(&batch.items, |out, item| {
        out.u32(item.position).flag(item.is_sent);
        put_need(out, item.sampler.as_ref().map(|sampler| sampler.need(vocab_size)));
        out.u32s(item.tokens.iter().map(|token| token.0)).u32s(item.pages.iter().map(|page| page.0));
    });
}

/// A batch as it came over; kept for its memory.
#[derive(Debug, Default)]
pub(crate) struct Items {
    pub(crate) items: Vec<Item>,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) pages: Vec<PageId>,
}

#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) position: u32,
    pub(crate) is_sent: bool,
    pub(crate) need: Option<LogitNeed>,
    /// Ends in the lists of all; an item begins where the one before ends.
    pub(crate) tokens_end: usize,
    pub(crate) pages_end: usize,
}

impl Items {
    pub(crate) fn read(&mut self, body: &mut In<'_>) -> Result<(), Malformed> {
        self.tokens.clear();
        self.pages.clear();
        let (tokens, pages) = (&mut self.tokens, &mut self.pages);
        self.items = body.list(|body| {
            let (position, is_sent, need) = (body.u32()?, body.flag()?, take_need(body)?);
            body.u32s(tokens, TokenId)?;
            body.u32s(pages, PageId)?;
            Ok(Item { position, is_sent, need, tokens_end: tokens.len(), pages_end: pages.len() })
        })?;
        body.end()
    }
}

/// What was found for an item; `None` where nothing was drawn, or the executor did not look.
pub(crate) type Row = Option<Result<Found, SampleError>>;

/// Writes what a step yields.
pub(crate) fn put_stepped(
    out: &mut Out,
    modelled: Option<Duration>,
    rows: impl ExactSizeIterator<Item = Row>,
) {
    put_modelled(out, modelled);
    out.list(rows, |out, row| match row {
        None => {
            out.u8(0);
        }
        Some(Ok(Found::Best(token))) => {
            out.u8(1).u32(token.0);
        }
        Some(Ok(Found::Kept(kept))) => {
            out.u8(2).list(kept, |out, (token, weight)| {
                out.u32(token.0).u64(weight);
            });
        }
        Some(Ok(Found::All(logits))) => {
            out.u8(3).u32s(logits.into_iter().map(f32::to_bits));
        }
        Some(Err(SampleError::NotFinite { token, value })) => {
            out.u8(4).u32(token.0).f32(value);
        }
        // Looking at logits fails in these two ways only.
        Some(Err(_)) => {
            out.u8(5);
        }
    });
}

fn put_modelled(out: &mut Out, modelled: Option<Duration>) {
    out.flag(modelled.is_some()).duration(modelled.unwrap_or_default());
}

/// Reads what a step yields.
pub(crate) fn take_stepped(body: &mut In<'_>) -> Result<(Option<Duration>, Vec<Row>), Malformed> {
    let is_modelled = body.flag()?;
    let modelled = Some(body.duration()?).filter(|_| is_modelled);
    let rows = body.list(|body| {
        Ok(match body.u8()? {
            0 => None,
            1 => Some(Ok(Found::Best(TokenId(body.u32()?)))),
            2 => Some(Ok(Found::Kept(body.list(|body| Ok((TokenId(body.u32()?), body.u64()?)))?))),
            3 => {
                let mut logits = Vec::new();
                body.u32s(&mut logits, f32::from_bits)?;
                Some(Ok(Found::All(logits)))
            }
            4 => Some(Err(SampleError::NotFinite { token: TokenId(body.u32()?), value: body.f32()? })),
            5 => Some(Err(SampleError::NoToken)),
            _ => return Err(Malformed("nothing of that kind is found in logits")),
        })
    })?;
    body.end()?;
    Ok((modelled, rows))
}

/// Writes why an executor did not do what it was asked.
pub(crate) fn put_error(out: &mut Out, error: &ExecutorError) {
    match error {
        ExecutorError::Load { reason } => out.u8(0).text(reason),
        ExecutorError::Device { reason } => out.u8(1).text(reason),
        ExecutorError::MalformedBatch { item, reason } => out.u8(2).size(*item).text(reason),
        ExecutorError::Memory { reason } => out.u8(3).text(reason),
        ExecutorError::Compute { reason } => out.u8(4).text(reason),
        other => out.u8(4).text(&other.to_string()),
    };
}

/// Reads it.
pub(crate) fn take_error(body: &mut In<'_>) -> Result<ExecutorError, Malformed> {
    Ok(match body.u8()? {
        0 => ExecutorError::Load { reason: body.text()? },
        1 => ExecutorError::Device { reason: body.text()? },
        2 => ExecutorError::MalformedBatch { item: body.size()?, reason: body.text()? },
        3 => ExecutorError::Memory { reason: body.text()? },
        4 => ExecutorError::Compute { reason: body.text()? },
        _ => return Err(Malformed("executors have no such error")),
    })
}

/// Reads a layer's number.
pub(crate) fn take_layer(body: &mut In<'_>) -> Result<LayerId, Malformed> {
    body.u32().map(LayerId)
}
