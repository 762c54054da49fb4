//! The executor contract, the sampler, and the executors that need no model.
//!
//! An [`Executor`] is one logical device that runs one model over paged KV memory: it takes a ragged [`Batch`] a step,
//! writes the KV of the new tokens layer by layer and draws a token with the [`Sampler`] of each item that has one. Grammars
//! enter through [`TokenConstraint`]. Two executors live here because they are the executable reading of the contract:
//! [`ToyExecutor`], whose text changes if a single byte of KV is wrong, and [`RooflineExecutor`], which says how long the
//! same steps would take on real hardware.
//!
//! # Why sampling is part of the step
//!
//! Logits of 150 000 entries would otherwise cross a device and a crate border for every token. The price is that the
//! sampler's state must not hide in the executor: it belongs to the sequence, is handed in with each item, and is a function
//! of the tokens so far alone. So an engine may crash and another may replay prompt and output and go on with the very token
//! that would have come next, under seeds, penalties and grammars.
//!
//! # Example
//!
//! A prompt is prefilled and the next token drawn:
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use microserving_executor::{Batch, BatchItem, Executor, Sampler, ToyConfig, ToyExecutor};
//! use microserving_protocol::{KvGeometry, KvMemory, MemoryKind, PageId, SamplingParams, TokenId};
//!
//! #[derive(Debug)]
//! struct Memory(Mutex<Vec<u8>>);
//! impl KvMemory for Memory {
//!     fn kind(&self) -> MemoryKind { MemoryKind::Host }
//!     fn num_bytes(&self) -> usize { self.0.lock().unwrap().len() }
//!     fn base_address(&self) -> usize { 0 }
//!     fn read(&self, at: usize, into: &mut [u8]) { into.copy_from_slice(&self.0.lock().unwrap()[at..][..into.len()]) }
//!     fn write(&self, at: usize, from: &[u8]) { self.0.lock().unwrap()[at..][..from.len()].copy_from_slice(from) }
//! }
//!
//! let mut executor = ToyExecutor::new(ToyConfig::default())?;
//! let geometry = KvGeometry { layout: executor.info().layout.clone(), num_pages: 4 };
//! let memory = Memory(Mutex::new(vec![0; geometry.region_bytes()]));
//! executor.attach(geometry, Arc::new(memory))?;
//!
//! let prompt: Vec<_> = b"once upon a time ".iter().map(|&byte| TokenId(byte.into())).collect();
//! let mut sampler = Sampler::new(SamplingParams::greedy(), 0, &prompt);
//! let pages = [PageId(2), PageId(0)];
//! let item = BatchItem { tokens: &prompt, position: 0, pages: &pages, sampler: Some(&mut sampler) , is_sent: false};
//! let output = executor.forward(&mut Batch { items: vec![item] }, &mut |_layer| {})?;
//! let sampled = output.sampled[0].as_ref().unwrap().as_ref().unwrap();
//! assert!(sampled.token.0 < 256);
//! # Ok::<(), microserving_executor::ExecutorError>(())
//! ```

#![forbid(unsafe_code)]

mod batch;
mod constraint;
mod contract;
mod numeric;
mod penalties;
mod philox;
mod roofline;
mod sampler;
mod select;
mod toy;

pub use constraint::{ConstraintError, TokenConstraint, TokenMask};
pub use contract::{Batch, BatchItem, Executor, ExecutorError, ExecutorInfo, Sampled, StepOutput};
pub use roofline::RooflineExecutor;
pub use sampler::{Found, LogitNeed, NotedSampler, SampleError, Sampler};
pub use toy::{ToyConfig, ToyExecutor};
