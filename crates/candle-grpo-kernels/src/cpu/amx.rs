//! bf16 products in AMX tile registers.
//!
//! A tile has 16 rows with 64 bytes each. One instruction multiplies 16 rows by 16 columns, 32 bf16
//! values each, and adds to 256 f32 sums.

use std::arch::asm;
use std::marker::PhantomData;
use std::sync::LazyLock;

/// Rows and columns in a block of sums: two by two tiles.
pub(super) const BLOCK: usize = 32;

/// Words per tile row.
pub(super) const STEP: usize = 16;

/// Returns whether the processor has bf16 tiles and the system lets this process use them.
pub(super) fn is_available() -> bool {
    static AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
        let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
        let (bf16, tiles) = (1 << 22, 1 << 24);
        features & bf16 != 0 && features & tiles != 0 && permitted()
    });
    *AVAILABLE
}

/// Requests the registers from the system. Their contents take 8 KiB more per thread.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    let (request, tile_data) = (0x1023, 18);
    // SAFETY: the call changes which thread state the system saves, and touches no memory in this
    // process.
    #[allow(unsafe_code)]
    unsafe {
        libc::syscall(libc::SYS_arch_prctl, request, tile_data) == 0
    }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Owns this thread's tile registers until dropped.
pub(super) struct Tiles(PhantomData<*mut ()>);

impl Tiles {
    /// # Safety
    ///
    /// AMX must be [available](is_available). The thread must not have other `Tiles`.
    #[allow(unsafe_code)]
    pub(super) unsafe fn new() -> Self {
        #[repr(C, align(64))]
        struct Shape {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut shape = Shape {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        shape.row_bytes[..8].fill(64);
        shape.rows[..8].fill(16);
        // SAFETY: the caller guarantees the instruction. The shape is valid for palette 1.
        unsafe {
            asm!("ldtilecfg [{shape}]", shape = in(reg) &raw const shape,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags));
        }
        Self(PhantomData)
    }

    /// Computes a block of sums, `target = a b`, or `target += a b` if `add` is set.
    ///
    /// Row strides are in bytes.
    ///
    /// # Safety
    ///
    /// `a` must have `BLOCK` rows with `steps * STEP` words, `b` must have `steps * STEP` rows with
    /// `BLOCK` words and no gaps, and `target` must have `BLOCK` rows with `BLOCK` values. `steps`
    /// must not be 0.
    #[allow(unsafe_code)]
    pub(super) unsafe fn multiply(
        &self,
        (a, a_step): (*const u8, usize),
        b: *const f32,
        steps: usize,
        (target, target_step): (*mut f32, usize),
        add: bool,
    ) {
        let (a_below, below) = (
            a.wrapping_add(STEP * a_step),
            target.wrapping_byte_add(STEP * target_step),
        );
        // SAFETY: the caller keeps the tiles in bounds. A `Tiles` exists, so they are configured.
        unsafe {
            asm!(
                "test {add:e}, {add:e}",
                "jz 2f",
                "tileloadd tmm0, [{target} + {target_step}*1]",
                "tileloadd tmm1, [{target} + {target_step}*1 + 64]",
                "tileloadd tmm2, [{below} + {target_step}*1]",
                "tileloadd tmm3, [{below} + {target_step}*1 + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "tileloadd tmm4, [{a} + {a_step}*1]",
                "tileloadd tmm6, [{b} + {b_step}*1]",
                "tileloadd tmm7, [{b} + {b_step}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a_below} + {a_step}*1]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 64",
                "add {a_below}, 64",
                "add {b}, {b_tile}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{target} + {target_step}*1], tmm0",
                "tilestored [{target} + {target_step}*1 + 64], tmm1",
                "tilestored [{below} + {target_step}*1], tmm2",
                "tilestored [{below} + {target_step}*1 + 64], tmm3",
                a = inout(reg) a => _,
                a_below = inout(reg) a_below => _,
                a_step = in(reg) a_step,
                b = inout(reg) b => _,
                b_step = in(reg) BLOCK * size_of::<f32>(),
                b_tile = const STEP * BLOCK * size_of::<f32>(),
                steps = inout(reg) steps => _,
                target = in(reg) target,
                below = in(reg) below,
                target_step = in(reg) target_step,
                add = in(reg) u32::from(add),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the instruction exists, because a `Tiles` does.
        #[allow(unsafe_code)]
        unsafe {
            asm!("tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags));
        }
    }
}
