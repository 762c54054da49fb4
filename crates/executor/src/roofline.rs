//! An executor that says the toy's tokens at a real machine's pace.
//!
//! [`HardwareProfile`] predicts how long a step would take on given hardware; [`RooflineExecutor`] returns that as
//! [`StepOutput::modelled`]. In real time it is a stand-in engine for work on the router, in virtual time it is the heart of
//! a simulator.

mod profile;

use std::sync::Arc;

use microserving_protocol::{KvGeometry, KvMemory, LayerId};

pub use self::profile::{Chunk, DeviceRates, HardwareProfile, ModelShape, StepShape};
use crate::{Batch, Executor, ExecutorError, ExecutorInfo, StepOutput, ToyConfig, ToyExecutor};

/// The toy executor with durations from a [`HardwareProfile`].
#[derive(Debug)]
pub struct RooflineExecutor {
    toy: ToyExecutor,
    profile: HardwareProfile,
}

impl RooflineExecutor {
    /// Wraps a toy; its own times are not used.
    ///
    /// # Errors
    /// As [`ToyExecutor::new`].
    pub fn new(config: ToyConfig, profile: HardwareProfile) -> Result<Self, ExecutorError> {
        Ok(Self { toy: ToyExecutor::new(config)?, profile })
    }

    /// Returns what the durations come from.
    #[must_use]
    pub fn profile(&self) -> &HardwareProfile {
        &self.profile
    }
}

impl Executor for RooflineExecutor {
    fn info(&self) -> &ExecutorInfo {
        self.toy.info()
    }

    fn attach(&mut self, geometry: KvGeometry, memory: Arc<dyn KvMemory>) -> Result<(), ExecutorError> {
        self.toy.attach(geometry, memory)
    }

    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        let shape = StepShape::of(batch);
        let mut output = self.toy.forward(batch, on_layer)?;
        output.modelled = Some(self.profile.step_time(&shape));
        Ok(output)
    }
}
