//! Engines join, drain and leave while the router serves.

use std::sync::Arc;

use microserving_protocol::ApiError;
use tracing::info;

use crate::index::follow;
use crate::watch::watch;
use crate::{Change, Engine, EngineSpec, RouterService};

/// Who makes a change that no operator asked for.
const PROGRAM: &str = "program";

impl RouterService {
    /// Takes in an engine and begins to watch it. It gets requests once it has been seen.
    ///
    /// # Errors
    /// 409 if there is an engine of that name, 400 if its weight is no share.
    pub fn add_engine(&self, spec: EngineSpec) -> Result<Arc<Engine>, ApiError> {
        check_weight(spec.weight)?;
        let name = spec.calls.name().to_owned();
        self.recorded(&Change::new(PROGRAM, &format!("add engine {name}")), || {
            let engine = self.shared.cluster.join(spec).ok_or_else(|| {
                ApiError::conflict(format!("the engine {name} is in the cluster already")).with_param("url")
            })?;
            self.follow(&engine);
            Ok(engine)
        })
    }

    /// Gives an engine no new requests, and moves those that it decodes to other engines. Those that cannot move end as they would.
    ///
    /// # Errors
    /// 404 if there is no such engine.
    pub fn drain_engine(&self, number: u32) -> Result<Arc<Engine>, ApiError> {
        self.recorded(&Change::new(PROGRAM, "drain engine"), || {
            let engine = self.member(number)?;
            engine.drain();
            let moving = self.move_away(&engine);
            info!(engine = engine.name(), in_flight = engine.in_flight(), moving, "engine drains");
            Ok(engine)
        })
    }

    /// Gives a draining engine requests again.
    ///
    /// # Errors
    /// 404 if there is no such engine.
    pub fn undrain_engine(&self, number: u32) -> Result<Arc<Engine>, ApiError> {
        self.recorded(&Change::new(PROGRAM, "undrain engine"), || {
            let engine = self.member(number)?;
            engine.undrain();
            Ok(engine)
        })
    }

    /// Lets an engine go. `force` sends the requests that are on it elsewhere.
    ///
    /// # Errors
    /// 404 if there is no such engine, 409 if it has requests in flight and `force` is false; nothing changes then.
    pub fn remove_engine(&self, number: u32, force: bool) -> Result<Arc<Engine>, ApiError> {
        self.recorded(&Change::new(PROGRAM, "remove engine"), || {
            let engine = self.member(number)?;
            let was_draining = engine.is_draining();
            // First no new ones, then the look at those there are.
            engine.drain();
            let in_flight = engine.in_flight();
            if in_flight > 0 && !force {
                if !was_draining {
                    engine.undrain();
                }
                return Err(self.busy(&engine, in_flight));
            }
            self.let_go(&engine, force);
            Ok(engine)
        })
    }

    /// Takes an engine out of the cluster, and ends what followed it.
    pub(crate) fn let_go(&self, engine: &Engine, force: bool) {
        if self.shared.cluster.leave(engine.number()) {
            let in_flight = engine.in_flight();
            engine.leave(force);
            self.shared.placement.forget(engine.number());
            self.shared.metrics.forget_engine(engine.name());
            info!(engine = engine.name(), number = engine.number(), in_flight, "engine left");
        }
    }

    pub(crate) fn busy(&self, engine: &Engine, in_flight: u32) -> ApiError {
        let message = format!(
            "the engine {} has {in_flight} request(s) in flight: drain it and wait, or give force=true",
            engine.name()
        );
        ApiError::conflict(message).with_code("engine_busy")
    }

    /// Returns the engine of a number.
    ///
    /// # Errors
    /// 404 if there is none.
    pub(crate) fn member(&self, number: u32) -> Result<Arc<Engine>, ApiError> {
        self.shared.cluster.engine(number).ok_or_else(|| no_engine(number))
    }

    /// Starts what goes on beside an engine for as long as it is in the cluster.
    pub(crate) fn follow(&self, engine: &Arc<Engine>) {
        info!(engine = engine.name(), number = engine.number(), role = engine.role().name(), "engine joined");
        let stop = self.spawner.stop();
        self.spawner.spawn(watch(engine.clone(), self.shared.clone(), stop.clone()));
        if let Some(feed) = self.shared.placement.index().join(engine.number()) {
            self.spawner.spawn(follow(engine.clone(), feed, stop.clone()));
        }
    }
}

/// Checks a share of the requests.
///
/// # Errors
/// 400 if it is not positive and finite.
pub(crate) fn check_weight(weight: f64) -> Result<(), ApiError> {
    if weight > 0.0 && weight <= 1e6 {
        return Ok(());
    }
    Err(ApiError::bad_request("weight", format!("weight is {weight}, must be above 0 and at most 1000000")))
}

fn no_engine(number: u32) -> ApiError {
    ApiError::not_found(format!("there is no engine {number}")).with_param("id").with_code("engine_not_found")
}
