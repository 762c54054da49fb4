//! An executor that says the toy's tokens at a real machine's pace.
//!
//! [`HardwareProfile`] predicts how long a step would take on given hardware; [`RooflineExecutor`] returns that as
//! [`StepOutput::modelled`]. In real time it is a stand-in engine for work on the router, in virtual time it is the heart of
//! a simulator.

use std::sync::Arc;

use microserving_cost::{Chunk, HardwareProfile, StepShape};
use microserving_protocol::{KvGeometry, KvMemory, LayerId};

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
        let shape = shape_of(batch);
        let mut output = self.toy.forward(batch, on_layer)?;
        output.modelled = Some(self.profile.step_time(&shape));
        Ok(output)
    }
}

/// Reads the shape off a batch: a single token that is sampled from, behind some context, is a decode.
fn shape_of(batch: &Batch<'_>) -> StepShape {
    let mut shape = StepShape::default();
    for item in &batch.items {
        if item.tokens.len() == 1 && item.position > 0 && item.sampler.is_some() {
            shape.decodes.push(item.position);
        } else {
            shape.prefills.push(Chunk { num_tokens: item.tokens.len() as u32, context: item.position });
        }
    }
    shape
}
