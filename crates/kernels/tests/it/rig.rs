//! Devices with memory that tests can see into.

use std::cell::RefCell;

use microserving_kernels::{Device, DevicePtr, Emulated, Order};

/// Bytes of a known pattern before and after each buffer.
const GUARD_BYTES: usize = 256;
const GUARD: u8 = 0xa5;

/// A file and line whose barrier is left out: set by `barriers`, for a process of its own.
pub(crate) const SKIP_VARIABLE: &str = "MICROSERVING_SKIP_BARRIER";

/// A device with memory that lives as long as it.
pub(crate) trait Rig {
    /// What runs kernels.
    fn device(&self) -> &dyn Device;
    /// Copies bytes to the device.
    fn upload(&self, bytes: &[u8]) -> Buffer;
    /// Copies them back, after all that was launched.
    fn download(&self, buffer: &Buffer) -> Vec<u8>;
    /// For messages.
    fn name(&self) -> String;
}

/// Bytes on a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) ptr: DevicePtr,
    len: usize,
}

impl dyn Rig + '_ {
    pub(crate) fn upload_u32(&self, values: &[u32]) -> Buffer {
        self.upload(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    pub(crate) fn upload_f32(&self, values: &[f32]) -> Buffer {
        self.upload(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Memory in which every number is a NaN until it is written.
    pub(crate) fn unwritten(&self, len: usize) -> Buffer {
        self.upload(&vec![0xff; len])
    }

    pub(crate) fn words(&self, buffer: &Buffer) -> Vec<u32> {
        let bytes = self.download(buffer);
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes"))).collect()
    }

    pub(crate) fn long_words(&self, buffer: &Buffer) -> Vec<u64> {
        let bytes = self.download(buffer);
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect()
    }
}

/// The CPU, by the shim.
struct Host {
    emulated: Emulated,
    order: Order,
    buffers: RefCell<Vec<(u64, Vec<u128>, usize)>>,
}

impl Rig for Host {
    fn device(&self) -> &dyn Device {
        &self.emulated
    }

    fn upload(&self, bytes: &[u8]) -> Buffer {
        let mut memory = vec![0_u128; (bytes.len() + 2 * GUARD_BYTES).div_ceil(16)];
        let as_bytes = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: inside the allocation, which is not looked at otherwise meanwhile.
        let address = unsafe {
            as_bytes.write_bytes(GUARD, memory.len() * 16);
            let at = as_bytes.add(GUARD_BYTES);
            at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            at as u64
        };
        self.buffers.borrow_mut().push((address, memory, bytes.len()));
        Buffer { ptr: DevicePtr(address), len: bytes.len() }
    }

    fn download(&self, buffer: &Buffer) -> Vec<u8> {
        let read = |at: u64, len: usize| {
            // SAFETY: `upload` made it so long, guards included, and nothing is freed before `self`; no kernel runs now.
            unsafe { std::slice::from_raw_parts(at as *const u8, len) }.to_vec()
        };
        let at = buffer.ptr.0;
        let before = read(at - GUARD_BYTES as u64, GUARD_BYTES);
        let after = read(at + buffer.len as u64, GUARD_BYTES);
        assert!(before.iter().chain(&after).all(|&byte| byte == GUARD), "written out of a buffer's bounds");
        read(at, buffer.len)
    }

    fn name(&self) -> String {
        format!("CPU, {:?}", self.order)
    }
}

/// Returns the CPU in one order of threads.
pub(crate) fn host(order: Order) -> Box<dyn Rig> {
    let emulated = Emulated::open(order).expect("the library was built with this test");
    if let Ok(skip) = std::env::var(SKIP_VARIABLE) {
        let (file, line) = skip.split_once(':').expect("FILE:LINE");
        emulated.skip_barrier(file, line.parse().expect("a line")).expect("no zero byte");
        // The first failure is all that is asked for.
        std::panic::set_hook(Box::new(|_| std::process::abort()));
    }
    Box::new(Host { emulated, order, buffers: RefCell::default() })
}

/// Returns the CPU in every order of threads, and the GPU if there is one: results must be the same on all to the bit where
/// the arithmetic is plain.
pub(crate) fn all() -> Vec<Box<dyn Rig>> {
    let mut rigs: Vec<_> = [Order::Forward, Order::Backward, Order::Shuffled].into_iter().map(host).collect();
    rigs.extend(gpu());
    rigs
}

/// Runs the same on every device and returns what all agree on.
pub(crate) fn agreed<T: PartialEq + std::fmt::Debug>(what: &str, run: impl Fn(&dyn Rig) -> T) -> T {
    let mut results = all().into_iter().map(|rig| (rig.name(), run(&*rig)));
    let (first_name, first) = results.next().expect("the CPU is always there");
    for (name, result) in results {
        assert!(result == first, "{what}: {name} differs from {first_name}");
    }
    first
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn gpu() -> Option<Box<dyn Rig>> {
    None
}

#[cfg(feature = "cuda")]
pub(crate) fn gpu() -> Option<Box<dyn Rig>> {
    static SAID: std::sync::Once = std::sync::Once::new();
    match cuda::Gpu::open() {
        Ok(gpu) => Some(Box::new(gpu)),
        Err(error) => {
            SAID.call_once(|| eprintln!("SKIPPED: nothing is run on a GPU: {error}"));
            None
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use microserving_kernels::KernelError;
    use microserving_kernels::cuda::{Memory, Module};

    use super::{Buffer, Device, DevicePtr, Rig};

    pub(super) struct Gpu {
        module: Module,
        memory: super::RefCell<Vec<Memory>>,
    }

    impl Gpu {
        pub(super) fn open() -> Result<Self, KernelError> {
            Ok(Self { module: Module::open(0)?, memory: super::RefCell::default() })
        }
    }

    impl Rig for Gpu {
        fn device(&self) -> &dyn Device {
            &self.module
        }

        fn upload(&self, bytes: &[u8]) -> Buffer {
            let memory = self.module.upload(bytes).expect("memory on the GPU");
            let ptr: DevicePtr = memory.ptr();
            self.memory.borrow_mut().push(memory);
            Buffer { ptr, len: bytes.len() }
        }

        fn download(&self, buffer: &Buffer) -> Vec<u8> {
            let memory = self.memory.borrow();
            let found = memory.iter().find(|memory| memory.ptr() == buffer.ptr).expect("uploaded here");
            self.module.download(found).expect("a copy from the GPU")
        }

        fn name(&self) -> String {
            "GPU".to_owned()
        }
    }
}
