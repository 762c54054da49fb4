//! A launch, what runs it, and what may be wrong with it.

use std::mem::size_of;

/// One launch of a kernel, its sizes checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name in the image.
    pub kernel: &'static str,
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, along x.
    pub threads: u32,
    /// Shared memory of a block, all of it dynamic.
    pub shared_bytes: u32,
}

/// Why a kernel was not launched, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A size is out of the kernel's bounds. Nothing was launched.
    #[error("{kernel}: {field} is {value}, must be {bound}")]
    Shape {
        /// The kernel, without its types.
        kernel: &'static str,
        /// The field, or what follows from several.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        bound: &'static str,
    },
    /// There is no such kernel: the types, or the head's size, are not among those that were compiled.
    #[error("{kernel}: none for {what}")]
    NotCompiled {
        /// The kernel, without its types.
        kernel: &'static str,
        /// The types or sizes.
        what: String,
    },
    /// The device refused the launch, or what ran failed.
    #[error("{kernel}: {reason}")]
    Device {
        /// The kernel's name in the image.
        kernel: &'static str,
        /// What the device says.
        reason: String,
    },
}

/// The parameters of a kernel.
///
/// # Safety
/// The type is `#[repr(C)]` without padding between fields, and laid out as the struct of the same purpose in the kernel's source.
pub unsafe trait Params: Copy {}

/// What runs kernels.
pub trait Device {
    /// Launches a kernel; `params` are the bytes of the parameters. The kernel may run later, in the order of launches.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    ///
    /// # Safety
    /// Every address in `params` is one of this device, and the memory behind it is as large and as little shared as the kernel's
    /// parameters say, from now until the kernel has run.
    unsafe fn launch(&self, launch: &Launch, params: &[u8]) -> Result<(), KernelError>;
}

/// Launches what was planned.
///
/// # Safety
/// As of [`Device::launch`].
pub(crate) unsafe fn launch<P: Params>(
    device: &dyn Device,
    launch: &Launch,
    params: &P,
) -> Result<(), KernelError> {
    // SAFETY: `Params` promises that there is no padding, so all bytes are initialised; they live as long as the borrow.
    let bytes =
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast::<u8>(), size_of::<P>()) };
    // SAFETY: as the caller promises.
    unsafe { device.launch(launch, bytes) }
}

/// A kernel's name, for checks of its sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checks(pub(crate) &'static str);

impl Checks {
    /// Returns an error that names the field unless it `holds`.
    pub(crate) fn that(
        self,
        holds: bool,
        field: &'static str,
        value: u64,
        bound: &'static str,
    ) -> Result<(), KernelError> {
        if holds { Ok(()) } else { Err(KernelError::Shape { kernel: self.0, field, value, bound }) }
    }

    /// Checks a number of blocks along y or z.
    pub(crate) fn blocks(self, field: &'static str, value: u32) -> Result<(), KernelError> {
        self.that((1..=65_535).contains(&value), field, value.into(), "1 to 65535")
    }

    /// Checks a number of blocks along x.
    pub(crate) fn many_blocks(self, field: &'static str, value: u64) -> Result<u32, KernelError> {
        self.that((1..=0x7fff_ffff).contains(&value), field, value, "1 to 2147483647")?;
        Ok(value as u32)
    }

    /// Checks an optional address's or scale's companion: a scale other than 1 needs a type that has scales.
    pub(crate) fn scale(self, field: &'static str, value: f32, is_scaled: bool) -> Result<(), KernelError> {
        let holds = value.is_finite() && value > 0.0 && (is_scaled || value == 1.0);
        self.that(
            holds,
            field,
            value.to_bits().into(),
            "the bits of a number above 0, of 1.0 unless KV is e4m3",
        )
    }
}
