//! What may go wrong in a run, and how often.

use std::time::Duration;

use microserving_cost::HardwareProfile;
use microserving_engine::Mutant;

use crate::Dice;

/// A run's shape. [`SimOptions::swarm`] draws one from a seed, so that a campaign of many seeds visits many kinds of trouble:
/// every run with all faults at once would rarely get anywhere.
#[derive(Clone, Debug, PartialEq)]
pub struct SimOptions {
    /// Engines; any of them plays any role.
    pub num_engines: usize,
    /// Requests while faults are on.
    pub num_requests: u32,
    /// The share of them that the real router serves. Programs of the simulation's own serve the others: they are ruder, and
    /// know more patterns.
    pub by_router: f64,
    /// How long faults are on; requests arrive all along.
    pub fault_phase: Duration,
    /// Tokens in a page.
    pub page_size: u32,
    /// Pages of each engine.
    pub num_pages: u32,
    /// Tokens computed in a step at most.
    pub max_batch_tokens: u32,
    /// Sequences computed at a time.
    pub max_running: u32,
    /// Leases of reservations.
    pub lease: Duration,
    /// The share of pages that may be quarantined.
    pub quarantine_cap: f32,
    /// Time of a step.
    pub step_time: Duration,
    /// Takes durations from hardware instead. Such a run is for its times: pages are not looked into.
    pub hardware: Option<HardwareProfile>,
    /// The longest prompt.
    pub max_prompt: u32,
    /// The longest output.
    pub max_output: u32,
    /// Calls, answers and stream events.
    pub network: NetworkFaults,
    /// KV transfers.
    pub transfers: TransferFaults,
    /// Mean time between crashes of engines; `None` is never.
    pub crash_every: Option<Duration>,
    /// The longest time that a crashed engine stays away.
    pub max_down: Duration,
    /// Mean time between pauses of engines (as by `SIGSTOP`); `None` is never.
    pub pause_every: Option<Duration>,
    /// The longest pause.
    pub max_pause: Duration,
    /// Mean time between partitions; `None` is never.
    pub cut_every: Option<Duration>,
    /// The longest partition.
    pub max_cut: Duration,
    /// Mean time between deaths of the router; `None` is never.
    pub router_death_every: Option<Duration>,
    /// How likely a client goes away before its answer is complete.
    pub cancel: f64,
    /// How likely a request is tried again on the same engines instead of others.
    pub stubborn: f64,
    /// How likely a program that gives up says so by `abort`; otherwise leases and broken connections must do.
    pub polite: f64,
    /// How likely a router is told, before a request, that some engine holds a part of its prompt, whether or not it does.
    pub poisoned_hints: f64,
    /// A rule that engines break, to see whether the checks notice.
    pub mutant: Option<Mutant>,
    /// Mean time between calls of a stranger: forged addresses, values out of bounds, requests that do not exist; `None` is
    /// never.
    pub stranger_every: Option<Duration>,
    /// Engines enough live at any time, so that the router must answer every request in full.
    pub must_answer: bool,
    /// The router copies contexts to where they will be asked for.
    pub contexts_move: bool,
    /// Faults at exact places; see [`super::FaultPoint`].
    pub faults_at: Vec<super::FaultPoint>,
}

/// What may happen to calls between router and engines. Times are whole milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkFaults {
    /// The longest time a message is under way. Messages of one call keep their order, calls overtake each other.
    pub max_delay: Duration,
    /// How likely a call never arrives.
    pub lose_call: f64,
    /// How likely the connection breaks before the answer arrives.
    pub lose_answer: f64,
    /// How likely a stream breaks at an event.
    pub break_stream: f64,
    /// How likely a call arrives twice.
    pub duplicate: f64,
    /// The longest time after the first that the second arrives.
    pub max_echo: Duration,
}

/// What may happen to KV under way.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferFaults {
    /// The longest time a run or control message is under way.
    pub max_delay: Duration,
    /// The longest time from a crash to its being certain.
    pub max_fence_delay: Duration,
    /// How likely a run is lost, and its claim with it.
    pub lose_writer: f64,
    /// How likely a run lands with one bit turned; only with checksums, as nothing else could notice.
    pub corrupt: f64,
    /// Verify checksums on arrival.
    pub checksums: bool,
}

impl SimOptions {
    /// Returns a run without faults.
    #[must_use]
    pub fn calm() -> Self {
        Self {
            num_engines: 3,
            num_requests: 24,
            by_router: 0.5,
            fault_phase: Duration::from_secs(3),
            page_size: 4,
            num_pages: 64,
            max_batch_tokens: 32,
            max_running: 8,
            lease: Duration::from_millis(800),
            quarantine_cap: 0.5,
            step_time: Duration::from_millis(3),
            hardware: None,
            max_prompt: 60,
            max_output: 12,
            network: NetworkFaults {
                max_delay: Duration::from_millis(2),
                lose_call: 0.0,
                lose_answer: 0.0,
                break_stream: 0.0,
                duplicate: 0.0,
                max_echo: Duration::ZERO,
            },
            transfers: TransferFaults {
                max_delay: Duration::from_millis(2),
                max_fence_delay: Duration::ZERO,
                lose_writer: 0.0,
                corrupt: 0.0,
                checksums: false,
            },
            crash_every: None,
            max_down: Duration::from_millis(500),
            pause_every: None,
            max_pause: Duration::from_millis(1000),
            cut_every: None,
            max_cut: Duration::from_millis(1000),
            router_death_every: None,
            cancel: 0.0,
            stubborn: 0.0,
            polite: 1.0,
            poisoned_hints: 0.0,
            mutant: None,
            stranger_every: None,
            must_answer: false,
            contexts_move: false,
            faults_at: Vec::new(),
        }
    }

    /// Draws a run's shape from its seed. One run in four is about transfers that outlive their requests.
    #[must_use]
    pub fn swarm(seed: u64) -> Self {
        let mut options = Self::draw(seed);
        let mut dice = Dice::new(seed).split(6);
        if dice.chance(0.25) {
            options.make_transfers_late(&mut dice);
        }
        options.poisoned_hints = Dice::new(seed).split(7).pick(&[0.0, 0.5, 1.0]);
        // Two of the longest requests fit, so that none is refused for its length and none has an engine to itself.
        let room = options.num_pages * options.page_size / 2;
        options.max_prompt = options.max_prompt.min(room - options.max_output - 2 * options.page_size);
        options
    }

    /// Short leases, little memory, and writers that stop in mid-write for several leases: pages change hands meanwhile.
    fn make_transfers_late(&mut self, dice: &mut Dice) {
        self.lease = dice.millis(150, 400);
        self.transfers.max_delay = dice.millis(20, 120);
        self.pause_every = Some(dice.millis(100, 300));
        self.max_pause = Duration::from_millis(2000);
        self.num_pages = dice.range(24, 36) as u32;
        self.num_requests = 36;
        self.quarantine_cap = 1.0;
        self.cancel = 0.3;
        self.stubborn = 0.0;
    }

    fn draw(seed: u64) -> Self {
        let mut dice = Dice::new(seed).split(1);
        let ms = Duration::from_millis;
        let mut sometimes = |share: f64, low: u64, high: u64| {
            let every = dice.millis(low, high);
            dice.chance(share).then_some(every)
        };
        let crash_every = sometimes(0.4, 400, 2500);
        let pause_every = sometimes(0.4, 300, 2000);
        let cut_every = sometimes(0.3, 300, 2000);
        let router_death_every = sometimes(0.2, 800, 3000);
        let stranger_every = sometimes(0.3, 20, 200);
        let checksums = dice.chance(0.5);
        Self {
            num_engines: 3,
            num_requests: dice.range(12, 28) as u32,
            by_router: dice.pick(&[0.2, 0.5, 0.8]),
            fault_phase: dice.millis(1500, 4000),
            page_size: dice.pick(&[2, 4, 4, 8]),
            num_pages: dice.range(28, 72) as u32,
            max_batch_tokens: dice.pick(&[8, 16, 32, 64]),
            max_running: dice.range(2, 12) as u32,
            lease: dice.millis(300, 1500),
            quarantine_cap: dice.pick(&[0.3, 0.6, 1.0]),
            step_time: dice.millis(1, 12),
            hardware: None,
            max_prompt: dice.range(12, 70) as u32,
            max_output: dice.range(2, 14) as u32,
            network: NetworkFaults {
                max_delay: dice.pick(&[ms(1), ms(10), ms(60), ms(400)]),
                lose_call: dice.pick(&[0.0, 0.0, 0.02, 0.1]),
                lose_answer: dice.pick(&[0.0, 0.0, 0.02, 0.1]),
                break_stream: dice.pick(&[0.0, 0.0, 0.01, 0.04]),
                duplicate: dice.pick(&[0.0, 0.1, 0.3, 0.5]),
                max_echo: dice.pick(&[ms(5), ms(200), ms(2000)]),
            },
            transfers: TransferFaults {
                max_delay: dice.pick(&[ms(0), ms(5), ms(50), ms(400), ms(2000)]),
                max_fence_delay: dice.pick(&[ms(0), ms(50), ms(1500)]),
                lose_writer: dice.pick(&[0.0, 0.0, 0.005, 0.03]),
                corrupt: if checksums { dice.pick(&[0.0, 0.0, 0.01]) } else { 0.0 },
                checksums,
            },
            crash_every,
            max_down: dice.millis(10, 900),
            pause_every,
            max_pause: dice.pick(&[ms(100), ms(1000), ms(4000)]),
            cut_every,
            max_cut: dice.pick(&[ms(100), ms(1000), ms(3000)]),
            router_death_every,
            cancel: dice.pick(&[0.0, 0.1, 0.4]),
            stubborn: dice.pick(&[0.0, 0.5, 1.0]),
            polite: dice.pick(&[1.0, 0.7, 0.0]),
            poisoned_hints: 0.0,
            mutant: None,
            stranger_every,
            must_answer: false,
            contexts_move: false,
            faults_at: Vec::new(),
        }
    }

    /// Makes engines break a rule.
    #[must_use]
    pub fn with_mutant(mut self, mutant: Mutant) -> Self {
        self.mutant = Some(mutant);
        self
    }
}
