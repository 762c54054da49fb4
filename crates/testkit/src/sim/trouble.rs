//! What brings engines, links and the router down, and up again.

use std::sync::Arc;
use std::time::Duration;

use super::node;
use super::world::World;
use crate::Dice;

/// Starts the troublemakers of a run; they stop by themselves when the fault phase ends.
pub(crate) fn start(world: &Arc<World>, dice: &Dice) {
    let options = &world.options;
    let kinds = [
        (Trouble::Crash, options.crash_every),
        (Trouble::Pause, options.pause_every),
        (Trouble::Cut, options.cut_every),
        (Trouble::RouterDeath, options.router_death_every),
    ];
    for (kind, every) in kinds {
        if let Some(every) = every {
            let dice = dice.split(kind as u64);
            tokio::spawn(make(Arc::clone(world), kind, every, dice));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    Crash = 11,
    Pause = 12,
    Cut = 13,
    RouterDeath = 14,
}

async fn make(world: Arc<World>, kind: Trouble, every: Duration, mut dice: Dice) {
    loop {
        tokio::time::sleep(dice.time(every / 4, every * 7 / 4)).await;
        if world.now() >= world.options.fault_phase {
            return;
        }
        let engine = dice.below(world.options.num_engines as u64) as usize;
        match kind {
            Trouble::Crash => {
                let down = dice.time(Duration::from_millis(1), world.options.max_down);
                world.crash(engine);
                tokio::time::sleep(down).await;
                node::start(&world, engine);
            }
            Trouble::Pause => {
                let pause = dice.time(Duration::from_millis(1), world.options.max_pause);
                if world.pause(engine) {
                    tokio::time::sleep(pause).await;
                    world.resume(engine);
                }
            }
            Trouble::Cut => {
                let length = dice.time(Duration::from_millis(1), world.options.max_cut);
                cut(&world, engine, length, &mut dice).await;
            }
            Trouble::RouterDeath => world.kill_router(),
        }
    }
}

/// Parts an engine from the router, or two engines from each other, for a while.
async fn cut(world: &World, engine: usize, length: Duration, dice: &mut Dice) {
    world.state().tally.cuts += 1;
    if dice.chance(0.5) {
        world.cut_from_router(engine);
        tokio::time::sleep(length).await;
        world.rejoin_router(engine);
    } else {
        let other = (engine + 1) % world.options.num_engines;
        world.hub.cut(&World::name_of(engine), &World::name_of(other));
        tokio::time::sleep(length).await;
        // The hub ends all cuts and pauses at once; an engine that is paused stops taking steps all the same.
        world.hub.heal();
        world.hub_changed.notify_one();
    }
}
