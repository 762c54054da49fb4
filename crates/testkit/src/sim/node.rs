//! One engine of the cluster: boots, steps, and is looked at after every step.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use microserving_engine::{Effects, Engine, EngineConfig, Entropy};
use microserving_executor::{Executor, RooflineExecutor, ToyConfig, ToyExecutor};
use microserving_kvcache::invariants;
use microserving_protocol::{ClusterKey, Incarnation, KvGeometry, PageId};

use super::oracle::read_page;
use super::spy::{SpyTransport, Window};
use super::world::World;
use super::{Invariant, SimOptions};

/// How long an engine that waits for nothing sleeps; anything that concerns it wakes it.
const FOREVER: Duration = Duration::from_secs(3600);

/// The name of the model that everyone serves.
pub(crate) const MODEL: &str = "toy";

/// The longest sequence, in tokens.
pub(crate) const MAX_CONTEXT: u32 = 4096;

/// Steps between two checks of all page books.
const BOOK_CHECK_EVERY: u64 = 4;

/// The toy of a run. Small, so that a run takes milliseconds; two layers, so that one is sent while the other is computed.
pub(crate) fn toy_config(options: &SimOptions) -> ToyConfig {
    ToyConfig {
        page_size: options.page_size,
        num_layers: 2,
        num_kv_heads: 1,
        head_dim: 1,
        model: MODEL.into(),
        max_context: MAX_CONTEXT,
        eos_one_in: 24,
        step_time: options.step_time,
        token_time: Duration::from_micros(100),
        ..ToyConfig::default()
    }
}

/// Boots an engine and runs it in a task of its own.
pub(crate) fn start(world: &Arc<World>, index: usize) {
    let (boot, incarnation, mint_seed) = {
        let mut state = world.state();
        if state.nodes[index].alive {
            return;
        }
        let (incarnation, mint_seed) = (Incarnation(state.dice.throw()), state.dice.throw());
        state.history.forget(index);
        let node = &mut state.nodes[index];
        node.boot += 1;
        node.incarnation = incarnation;
        (node.boot, incarnation, mint_seed)
    };
    let name = World::name_of(index);
    let window = Window::default();
    let transport = SpyTransport::new(world.hub.transport(&name), window.clone());
    let toy = toy_config(&world.options);
    let executor: Box<dyn Executor> = match &world.options.hardware {
        None => Box::new(ToyExecutor::new(toy).expect("within its bounds")),
        Some(hardware) => Box::new(RooflineExecutor::new(toy, hardware.clone()).expect("within its bounds")),
    };
    let mut key = [7; 32];
    key[..8].copy_from_slice(&incarnation.0.to_le_bytes());
    let entropy = Entropy {
        incarnation,
        cluster_key: ClusterKey::from_random(key),
        // Each engine has a key of its own: only the receiver can judge an address.
        key_is_shared: false,
        mint_seed,
    };
    let config = engine_config(&world.options, &name);
    let mut engine = Engine::new(config, executor, Box::new(transport), entropy)
        .expect("the simulation's configuration is within its bounds");
    engine.set_mutant(world.options.mutant);
    let wake = Arc::clone(&world.wakes[index]);
    engine.set_waker(Arc::new(move || wake.notify_one()));

    let node =
        Serving { world: Arc::clone(world), index, boot, engine, window, num_steps: 0, last_due: None };
    world.state().nodes[index].alive = true;
    let task = tokio::spawn(node.run());
    world.state().nodes[index].task = Some(task.abort_handle());
    world.trace(&[8, index as u64, boot]);
    world.wakes[index].notify_one();
}

fn engine_config(options: &SimOptions, name: &str) -> EngineConfig {
    EngineConfig {
        max_batch_tokens: options.max_batch_tokens,
        max_running: options.max_running,
        max_waiting: 64,
        max_wait: Duration::from_secs(if options.hardware.is_some() { 600 } else { 20 }),
        lease: options.lease,
        retry_after: Duration::from_millis(100),
        aging: Duration::from_millis(500),
        quarantine_cap: options.quarantine_cap,
        // Longer than a run, so that what is remembered need not be guessed.
        tombstone_ttl: Duration::from_secs(600),
        // The checks here report instead of stopping the run where it stands.
        check_invariants: false,
        ..EngineConfig::new(name, options.num_pages)
    }
}

/// A running engine.
struct Serving {
    world: Arc<World>,
    index: usize,
    boot: u64,
    engine: Engine,
    window: Window,
    num_steps: u64,
    /// When the hub's next message was due at the last look into the pages.
    last_due: Option<Duration>,
}

impl Serving {
    async fn run(mut self) {
        let world = Arc::clone(&self.world);
        let wake = Arc::clone(&world.wakes[self.index]);
        loop {
            wait_while_paused(&world, self.index).await;
            let commands = world.take_inbox(self.index);
            {
                let mut state = world.state();
                commands.iter().for_each(|command| state.history.take(self.index, command));
            }
            let due = world.hub.next_due();
            let now = world.now();
            let step = catch_unwind(AssertUnwindSafe(|| self.engine.step(now, commands.into_iter())));
            let effects = match step {
                Ok(effects) => effects,
                Err(panic) => {
                    let detail = format!("engine {} panicked: {}", self.index, message(&*panic));
                    world.violate(Invariant::NoPanic, detail);
                    world.crash(self.index);
                    return;
                }
            };
            if world.hub.next_due() != due {
                world.hub_changed.notify_one();
            }
            self.look(&effects);
            let Effects { effects, modelled, computed, .. } = effects;
            if computed {
                world.pass_point();
            }
            if let Some(modelled) = modelled {
                tokio::time::sleep(modelled).await;
            }
            wait_while_paused(&world, self.index).await;
            for effect in effects {
                if !world.is_running(self.index, self.boot) {
                    return;
                }
                world.tell(effect);
            }
            if !world.is_running(self.index, self.boot) {
                return;
            }
            if computed {
                // A step that models no time at all must not keep the others from running.
                tokio::task::yield_now().await;
                continue;
            }
            let now = world.now();
            let wait = self.engine.next_wakeup().map_or(FOREVER, |at| {
                // At least a tick, so that a wake-up which changes nothing costs time and not a hang.
                at.saturating_sub(now).max(Duration::from_millis(1))
            });
            tokio::select! {
                biased;
                () = wake.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Checks everything that can be seen from outside after a step.
    fn look(&mut self, effects: &Effects) {
        let world = &self.world;
        if world.options.hardware.is_some() {
            return;
        }
        let counts = self.engine.cache().counts();
        let mut words = vec![9, self.index as u64, effects.effects.len() as u64, effects.computed.into()];
        words.extend([counts.free, counts.owned, counts.cached, counts.quarantined].map(u64::from));
        world.trace(&words);
        self.num_steps += 1;
        let mut state = world.state();
        state.tally.steps += 1;
        let judged: Vec<_> =
            effects.effects.iter().filter_map(|e| state.history.judge(self.index, e).err()).collect();
        drop(state);
        for (invariant, detail) in judged {
            world.violate(invariant, detail);
        }
        let sum = counts.free + counts.reserved + counts.owned + counts.cached + counts.quarantined;
        if sum != world.options.num_pages {
            world.violate(Invariant::PagesAddUp, format!("engine {}: {counts:?}", self.index));
        }
        // The books are long and stay wrong once they are: every few steps is enough, and most of a run's time.
        if self.num_steps.is_multiple_of(BOOK_CHECK_EVERY)
            && let Err(violation) = invariants::check(self.engine.cache())
        {
            let detail = format!("engine {}: {violation}", self.index);
            world.violate(Invariant::PagesImmutable, detail);
        }
        // What was written since the last look was written by a step, or by a peer, which takes the hub some message.
        let due = world.hub.next_due();
        if effects.computed || due != self.last_due {
            self.last_due = due;
            self.look_into_pages();
        }
        self.answer_inspection();
    }

    /// Compares every page that can be matched with what its tokens say it holds.
    fn look_into_pages(&self) {
        let world = &self.world;
        let Some(memory) = self.window.memory() else { return };
        let geometry = KvGeometry {
            layout: self.engine.info().executor.layout.clone(),
            num_pages: world.options.num_pages,
        };
        let oracle = world.oracle.lock().unwrap_or_else(PoisonError::into_inner);
        for page in (0..world.options.num_pages).map(PageId) {
            let Some(name) = self.engine.cache().prefixes().hash(page) else { continue };
            let found = read_page(&*memory, &geometry, page);
            let complaint = match oracle.page(name) {
                Some(expected) if expected == found => continue,
                Some(_) => "does not hold what its tokens say",
                None => "holds tokens that nobody asked for or that no model would say",
            };
            let detail = format!("engine {}: page {page}, which can be matched, {complaint}", self.index);
            drop(oracle);
            world.violate(Invariant::Uncontaminated, detail);
            return;
        }
    }

    fn answer_inspection(&mut self) {
        let wanted = self.world.state().nodes[self.index].inspection.take();
        if let Some(wanted) = wanted {
            let inspection = Inspection { counts: self.engine.cache().counts(), idle: self.engine.is_idle() };
            // The run may have ended meanwhile.
            let _ = wanted.send(inspection);
        }
    }
}

async fn wait_while_paused(world: &World, index: usize) {
    while world.is_paused(index) {
        world.wakes[index].notified().await;
    }
}

/// What is left in an engine.
#[derive(Debug)]
pub(crate) struct Inspection {
    pub(crate) counts: microserving_kvcache::PageCounts,
    pub(crate) idle: bool,
}

impl Inspection {
    /// Says what is left that should not be.
    pub(crate) fn complaints(&self) -> Vec<(Invariant, String)> {
        let mut complaints = Vec::new();
        let counts = self.counts;
        if counts.reserved + counts.owned + counts.quarantined > 0 {
            complaints.push((Invariant::PagesAddUp, format!("{counts:?}")));
        }
        if !self.idle {
            complaints.push((Invariant::Ends, "something still lives".to_owned()));
        }
        complaints
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
