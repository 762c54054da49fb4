//! One forward pass: the batch, the puts that ride along with it layer by layer, and what comes of it.

use std::sync::Arc;
use std::time::Duration;

use microserving_executor::{Batch, BatchItem, ExecutorError, SampleError, Sampled, Sampler};
use microserving_protocol::{KvAddrInfo, KvGeometry, KvRange, LayerId, PageId};
use microserving_transport::{ChannelId, KvTransport, plan_layer};

use crate::planner::PlanItem;
use crate::request::{Ending, finish_reason};
use crate::sequence::{Event, Pages, Slot, State, Work};
use crate::{Engine, EngineError};

/// What one sending sequence puts while a step computes: the part of its range that is in this chunk.
#[derive(Debug)]
struct RidingPut {
    slot: Slot,
    channel: ChannelId,
    address: Arc<KvAddrInfo>,
    range: KvRange,
    /// Why a layer of it could not be put.
    failure: Option<String>,
}

impl Engine {
    /// Computes a plan and carries its results where they belong; returns how long it takes on the modelled hardware.
    pub(crate) fn compute(&mut self, plan: Vec<PlanItem>) -> Option<Duration> {
        let mut samplers: Vec<Option<Sampler>> = plan.iter().map(|item| self.take_sampler(item)).collect();
        let mut puts: Vec<RidingPut> = plan.iter().filter_map(|item| self.riding_put(item)).collect();
        let mut batch = Batch::default();
        for (item, sampler) in plan.iter().zip(&mut samplers) {
            let sequence = self.sequences.get(&item.slot).expect("the plan was made of these sequences");
            batch.items.push(BatchItem {
                tokens: &sequence.tokens[item.range.start as usize..item.range.end as usize],
                position: item.range.start,
                pages: sequence.pages.list(),
                sampler: sampler.as_mut(),
                is_sent: puts.iter().any(|put| put.slot == item.slot),
            });
        }
        let (transport, sequences, geometry) = (&mut self.transport, &self.sequences, &self.geometry);
        let mut on_layer = |layer: LayerId| {
            for put in puts.iter_mut().filter(|put| put.failure.is_none()) {
                let pages = sequences.get(&put.slot).map_or(&[][..], |sequence| sequence.pages.list());
                put.failure = put_layer(
                    transport.as_mut(),
                    geometry,
                    pages,
                    put.channel,
                    &put.address,
                    layer,
                    put.range,
                )
                .err();
            }
        };
        let result = self.executor.forward(&mut batch, &mut on_layer);
        drop(batch);
        self.counters.steps += 1;
        for (item, sampler) in plan.iter().zip(samplers) {
            if let Some(sequence) = self.sequences.get_mut(&item.slot)
                && let Work::Generate(choice) = &mut sequence.work
                && item.draw
            {
                choice.sampler = sampler;
            }
        }
        let output = match result {
            Ok(output) => output,
            // Nobody's fault and nobody's end: what was in the batch is computed again.
            Err(error) if self.executor.lost().is_some() => {
                tracing::warn!(%error, num_items = plan.len(), "a step was lost with its device");
                self.look_after_device();
                return None;
            }
            Err(error) => {
                self.fail_batch(&plan, &error);
                return None;
            }
        };
        for put in puts {
            if let Some(reason) = put.failure {
                self.fail_send(put.slot, &EngineError::Transport { reason });
            }
        }
        let mut sampled = output.sampled.into_iter();
        for item in plan {
            let sampled = sampled.next().flatten();
            self.advance(&item);
            if item.draw {
                self.draw(item.slot, sampled);
            } else {
                self.finish_put_if_computed(item.slot);
            }
        }
        output.modelled
    }

    fn take_sampler(&mut self, item: &PlanItem) -> Option<Sampler> {
        match &mut self.sequences.get_mut(&item.slot)?.work {
            Work::Generate(choice) if item.draw => choice.sampler.take(),
            _ => None,
        }
    }

    fn riding_put(&self, item: &PlanItem) -> Option<RidingPut> {
        let Work::Send(delivery) = &self.sequences.get(&item.slot)?.work else { return None };
        let begin = delivery.range.begin().max(item.range.start);
        let range = KvRange::new(begin, item.range.end).filter(|range| !range.is_empty())?;
        Some(RidingPut {
            slot: item.slot,
            channel: delivery.channel,
            address: Arc::clone(&delivery.address),
            range,
            failure: None,
        })
    }

    /// Notes that a chunk is computed, and shares the pages that it filled.
    fn advance(&mut self, item: &PlanItem) {
        let Some(sequence) = self.sequences.get_mut(&item.slot) else { return };
        sequence.computed = item.range.end;
        if sequence.state == State::Prefilling {
            self.counters.prefill_tokens += u64::from(item.range.end - item.range.start);
        }
        self.share_pages(item.slot);
    }

    /// Makes a sequence's full pages matchable by others.
    pub(crate) fn share_pages(&mut self, slot: Slot) {
        let page_size = self.geometry.layout.page_size;
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let full = sequence.computed / page_size * page_size;
        let Pages::Table(table) = &mut sequence.pages else { return };
        if full <= table.num_shared_tokens() {
            return;
        }
        match self.cache.commit(table, &sequence.tokens[..full as usize]) {
            Ok(committed) => {
                // Puts of a page that was replaced by its equal may still be reading it.
                if let Work::Send(delivery) = &mut sequence.work
                    && !committed.replaced.is_empty()
                {
                    delivery.replaced.push(committed.replaced);
                }
            }
            Err(error) => tracing::error!(%error, "computed pages could not be shared"),
        }
    }

    /// Carries one drawn token to its sequence, its request and its listeners.
    fn draw(&mut self, slot: Slot, sampled: Option<Result<Sampled, SampleError>>) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Work::Generate(choice) = &sequence.work else { return };
        let (id, index) = (choice.request, choice.index);
        let sampled = match sampled {
            Some(Ok(sampled)) => sampled,
            Some(Err(error)) => {
                let error = sample_error(error);
                self.fail_request(id, &error);
                return;
            }
            None => {
                let reason = "it returned no token where one was asked for".into();
                self.fail_request(id, &EngineError::Executor { reason });
                return;
            }
        };
        sequence.tokens.push(sampled.token);
        sequence.happen(Event::Drew);
        let len = sequence.len();
        let seq_id = sequence.key.seq_id.clone();
        self.counters.decode_tokens += 1;
        let Some(request) = self.requests.get_mut(&id) else { return };
        let finish = finish_reason(
            &request.limits,
            sampled.token,
            sampled.grammar_complete,
            request.next_output(index),
            len,
        );
        request.yield_token(index, sampled.token, sampled.logprob, finish, &mut self.effects);
        let done = request.ending == Some(Ending::Done);
        let num_logged = request.num_logged();
        if index == 0 {
            self.release_followers(slot);
        }
        if finish.is_some() {
            self.retire(slot);
        }
        if done {
            self.calls.keep_log(&seq_id, num_logged);
        }
    }

    /// Lets the other choices of a request match what the first one has computed.
    fn release_followers(&mut self, leader: Slot) {
        for sequence in self.sequences.values_mut() {
            if let Work::Generate(choice) = &mut sequence.work
                && choice.behind == Some(leader)
            {
                choice.behind = None;
                sequence.since = self.now;
            }
        }
    }

    /// Ends the sequences that a failed step was computing; the others go on.
    fn fail_batch(&mut self, plan: &[PlanItem], error: &ExecutorError) {
        tracing::error!(%error, num_items = plan.len(), "a step failed");
        let told = EngineError::Executor { reason: error.to_string() };
        match error {
            // The batch was refused before anything was computed, so nothing was put either.
            ExecutorError::MalformedBatch { item, .. } if *item < plan.len() => {
                self.fail(plan[*item].slot, &told);
            }
            _ => {
                for item in plan {
                    self.fail(item.slot, &told);
                }
            }
        }
    }
}

/// Queues the copies of one layer of `range`.
pub(crate) fn put_layer(
    transport: &mut dyn KvTransport,
    geometry: &KvGeometry,
    pages: &[PageId],
    channel: ChannelId,
    address: &KvAddrInfo,
    layer: LayerId,
    range: KvRange,
) -> Result<(), String> {
    let remote = KvGeometry { layout: geometry.layout.clone(), num_pages: address.num_pages };
    let first_page = address.range.begin() / geometry.layout.page_size;
    let runs = plan_layer(geometry, pages, &remote, &address.pages, first_page, layer, range)
        .map_err(|error| error.to_string())?;
    transport.put(channel, &runs).map_err(|error| error.to_string())
}

fn sample_error(error: SampleError) -> EngineError {
    match error {
        SampleError::InvalidParam { field, reason } => EngineError::InvalidField { field, reason },
        error => EngineError::Executor { reason: error.to_string() },
    }
}
