//! Tile registers and their instructions, which have no stable intrinsics.
//!
//! The compiler does not know these registers, so nothing else uses them while a [`Shapes`] is loaded.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::LazyLock;

/// Rows of a full tile register.
pub(crate) const HIGH: usize = 16;

/// Bytes of a row of one.
pub(crate) const WIDE: usize = 64;

/// Says whether the processor has tiles of bytes and of bf16, and the system lets this process use them. Asks for it the first time: state that
/// large is kept for those alone who do.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: LazyLock<bool> = LazyLock::new(|| is_there() && is_permitted());
    *AVAILABLE
}

fn is_there() -> bool {
    const XSAVE: u32 = 1 << 27;
    const BF16_TILES_BYTES: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const TILE_STATE: u64 = 1 << 17 | 1 << 18;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & XSAVE == 0 {
        return false;
    }
    // SAFETY: the system has switched the instruction on.
    __cpuid_count(7, 0).edx & BF16_TILES_BYTES == BF16_TILES_BYTES
        && unsafe { _xgetbv(0) } & TILE_STATE == TILE_STATE
}

#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: changes nothing but what this process may use, all of its threads included.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The shapes of the eight registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
pub(crate) struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// Takes `(rows, bytes of a row)` of each register.
    pub(crate) fn new(registers: [(usize, usize); 8]) -> Self {
        let mut all = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (at, (rows, row_bytes)) in registers.into_iter().enumerate() {
            assert!((1..=HIGH).contains(&rows) && (4..=WIDE).contains(&row_bytes), "no such tile");
            (all.rows[at], all.row_bytes[at]) = (rows as u8, row_bytes as u16);
        }
        all
    }

    /// Gives this thread's registers their shapes until the result is dropped.
    ///
    /// # Safety
    /// Tiles [are available](is_available), and no other shapes are loaded by this thread.
    pub(crate) unsafe fn load(&self) -> Loaded {
        // SAFETY: the 64 bytes are a valid configuration; the rest is the caller's promise.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, preserves_flags, readonly)) };
        Loaded(())
    }
}

/// Registers in use. Given back when dropped, so that no one saves them at the next change of threads.
pub(crate) struct Loaded(());

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: shapes are loaded.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// Loads register `$tile` from rows `$stride` bytes apart.
macro_rules! load {
    ($tile:literal, $from:expr, $stride:expr) => {
        std::arch::asm!(
            concat!("tileloadd tmm", $tile, ", [{from} + {stride}]"),
            from = in(reg) $from,
            stride = in(reg) $stride,
            options(nostack, preserves_flags, readonly)
        )
    };
}

/// Stores register `$tile` to rows `$stride` bytes apart.
macro_rules! store {
    ($tile:literal, $to:expr, $stride:expr) => {
        std::arch::asm!(
            concat!("tilestored [{to} + {stride}], tmm", $tile),
            to = in(reg) $to,
            stride = in(reg) $stride,
            options(nostack, preserves_flags)
        )
    };
}

/// Makes register `$tile` zero.
macro_rules! zero {
    ($tile:literal) => {
        std::arch::asm!(concat!("tilezero tmm", $tile), options(nomem, nostack, preserves_flags))
    };
}

/// Adds to register `$sum` the product of `$left` and `$right` by instruction `$multiply`.
macro_rules! multiply {
    ($multiply:literal, $sum:literal, $left:literal, $right:literal) => {
        std::arch::asm!(
            concat!($multiply, " tmm", $sum, ", tmm", $left, ", tmm", $right),
            options(nomem, nostack, preserves_flags)
        )
    };
}

pub(crate) use {load, multiply, store, zero};
