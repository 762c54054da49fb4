//! What the device copies and multiplies at best, by the same kernels: what the executor is held against.

use std::ptr::NonNull;
use std::sync::Arc;

use microserving_executor_cuda::{Accelerator, Stream};
use microserving_kernels::{Arithmetic, DevicePtr, Dtype, Embedding, Matmul};

use crate::{Result, timed};

/// Times that each is done.
const TURNS: u32 = 10;

/// Memory for a measurement.
struct Room<'a> {
    device: &'a dyn Accelerator,
    ptr: DevicePtr,
}

impl<'a> Room<'a> {
    fn new(device: &'a Arc<dyn Accelerator>, num_bytes: usize) -> Result<Self> {
        Ok(Self { device: &**device, ptr: device.allocate(num_bytes)? })
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, given back once; launches with it were waited for.
        unsafe { self.device.free(self.ptr) };
    }
}

/// Launches something again and again; returns the seconds of one.
fn repeat(device: &Arc<dyn Accelerator>, launch: impl Fn() -> Result<()>) -> Result<f64> {
    launch()?;
    device.synchronize(Stream::Compute)?;
    let (done, time) = timed(|| -> Result<()> {
        for _ in 0..TURNS {
            launch()?;
        }
        Ok(device.synchronize(Stream::Compute)?)
    });
    done?;
    Ok(time.as_secs_f64() / f64::from(TURNS))
}

/// Returns bytes read and written a second, copying rows of 8 KiB.
pub(crate) fn bytes_a_second(device: &Arc<dyn Accelerator>, mib: usize) -> Result<f64> {
    const ROW: usize = 8192;
    let (rows, num_bytes) = (mib * (1 << 20) / ROW, mib << 20);
    let (from, to) = (Room::new(device, num_bytes)?, Room::new(device, num_bytes)?);
    let list = Room::new(device, rows * 4)?;
    let words: Vec<u8> = (0..rows as u32).flat_map(u32::to_ne_bytes).collect();
    // SAFETY: as many bytes as there is room for; they live until the copy was waited for.
    unsafe { device.copy_in(Stream::Compute, list.ptr, NonNull::from(&words[..]).cast(), words.len())? };
    device.synchronize(Stream::Compute)?;
    let copy = Embedding {
        out: to.ptr,
        table: from.ptr,
        tokens: list.ptr,
        hidden: (ROW / 2) as u32,
        vocab_size: rows as u32,
    };
    let launch = || {
        // SAFETY: room for all rows; nobody else has it.
        unsafe { copy.launch(device.kernels(), Dtype::Bf16, rows as u32)? };
        Ok(())
    };
    let seconds = repeat(device, launch)?;
    Ok(2.0 * num_bytes as f64 / seconds)
}

/// Returns operations a second of a square product in bf16 on tensor cores.
pub(crate) fn flops(device: &Arc<dyn Accelerator>, features: u32) -> Result<f64> {
    let num_bytes = features as usize * features as usize * 2;
    let (out, x, weight) =
        (Room::new(device, num_bytes)?, Room::new(device, num_bytes)?, Room::new(device, num_bytes)?);
    let matmul = Matmul {
        out: out.ptr,
        x: x.ptr,
        weight: weight.ptr,
        num_rows: features,
        out_features: features,
        in_features: features,
        out_is_f32: 0,
    };
    let launch = || {
        // SAFETY: room for all three; nobody else has it.
        unsafe { matmul.launch(device.kernels(), Arithmetic::TensorCore, Dtype::Bf16)? };
        Ok(())
    };
    let seconds = repeat(device, launch)?;
    Ok(2.0 * f64::from(features).powi(3) / seconds)
}
