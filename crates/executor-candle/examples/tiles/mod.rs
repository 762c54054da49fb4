//! What the instructions of AMX do at most, for the examples that tell a kernel's share of it.

#[path = "../../src/kernels/amx/tile.rs"]
#[allow(
    clippy::duplicate_mod,
    dead_code,
    unused_imports,
    unused_macros,
    reason = "the module is the crate's, of which this multiplies alone"
)]
mod tile;

pub(crate) use tile::is_available;
use tile::{HIGH, Shapes, WIDE, multiply, zero};

/// Operations of a round of either kernel.
pub(crate) const OPERATIONS: usize = 4 * 2 * HIGH * HIGH * 32;

/// Defines a kernel: four sums of sixteen rows and columns.
macro_rules! kernel {
    ($name:ident, $instruction:literal, $row_bytes:expr) => {
        pub(crate) fn $name(rounds: u64) {
            let (sums, left, right) = ((HIGH, WIDE), (HIGH, $row_bytes), ($row_bytes / 4, WIDE));
            let shapes = Shapes::new([sums, sums, sums, sums, left, right, left, right]);
            // SAFETY: the callers have seen that tiles are available; registers alone are touched, which no one else uses.
            unsafe {
                let _loaded = shapes.load();
                zero!(4);
                zero!(5);
                for _ in 0..rounds {
                    multiply!($instruction, 0, 4, 5);
                    multiply!($instruction, 1, 4, 5);
                    multiply!($instruction, 2, 4, 5);
                    multiply!($instruction, 3, 4, 5);
                }
            }
        }
    };
}
// A scale for every 32 inputs leaves half of an instruction's.
kernel!(tdpbssd, "tdpbssd", WIDE / 2);
kernel!(tdpbf16ps, "tdpbf16ps", WIDE);
