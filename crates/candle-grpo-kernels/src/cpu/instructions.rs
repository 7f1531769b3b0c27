//! Instruction sets for the CPU paths.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use candle_core::{Error, Result, bail};
use pulp::Arch;

/// Environment variable that selects the instruction set.
const VARIABLE: &str = "CANDLE_GRPO_CPU";

/// An instruction set for the CPU operators. Each set includes all earlier sets that the processor
/// supports.
///
/// The default is the processor's best set. Set the environment variable `CANDLE_GRPO_CPU` to
/// select another one that it supports, to reproduce another processor's bf16 results, or to test
/// and time a path. In f32, AVX2 and all later sets give the same bits.
///
/// ```
/// use candle_grpo_kernels::CpuInstructions;
///
/// let selected = CpuInstructions::selected()?;
/// assert!(CpuInstructions::available().contains(&selected));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuInstructions {
    /// Baseline instructions for the target: much slower, and without fused multiply-adds.
    Portable,
    /// NEON, on Arm.
    Neon,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 (F, BW, CD, DQ, VL).
    Avx512,
    /// Also multiplies pairs of bf16.
    Avx512Bf16,
    /// Also multiplies bf16 in tiles.
    Amx,
}

impl CpuInstructions {
    const ALL: [Self; 6] = [
        Self::Portable,
        Self::Neon,
        Self::Avx2,
        Self::Avx512,
        Self::Avx512Bf16,
        Self::Amx,
    ];

    /// Returns the sets that this processor supports, the best last.
    pub fn available() -> Vec<Self> {
        let mut all = Self::ALL.to_vec();
        all.retain(|set| set.is_available());
        all
    }

    /// Returns the set that the operators use. It never changes within a process.
    ///
    /// # Errors
    ///
    /// Fails if `CANDLE_GRPO_CPU` does not name an available set. Every operator on the CPU then
    /// fails in the same way.
    pub fn selected() -> Result<Self> {
        selection().as_ref().copied().map_err(Error::msg)
    }

    /// Returns the name used in `CANDLE_GRPO_CPU`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Amx => "amx",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => false,
            Self::Avx2 => pulp::x86::V3::is_available(),
            Self::Avx512 => pulp::x86::V4::is_available(),
            Self::Avx512Bf16 => {
                Self::Avx512.is_available() && is_x86_feature_detected!("avx512bf16")
            }
            Self::Amx => Self::Avx512Bf16.is_available() && super::amx::is_available(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64") && !matches!(Arch::new(), Arch::Scalar),
            _ => false,
        }
    }
}

impl fmt::Display for CpuInstructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CpuInstructions {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let available = Self::available();
        match available.iter().find(|set| set.name() == name) {
            Some(&set) => Ok(set),
            None => bail!(
                "{VARIABLE} is {name:?}, must be one of those that this processor has: {}",
                available
                    .iter()
                    .map(|set| set.name())
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        }
    }
}

/// The selected set, or the error.
fn selection() -> &'static std::result::Result<CpuInstructions, String> {
    static SELECTION: OnceLock<std::result::Result<CpuInstructions, String>> = OnceLock::new();
    SELECTION.get_or_init(|| match std::env::var_os(VARIABLE) {
        Some(name) if !name.is_empty() => name
            .to_string_lossy()
            .parse()
            .map_err(|error: Error| error.to_string()),
        _ => Ok(CpuInstructions::available()
            .pop()
            .unwrap_or(CpuInstructions::Portable)),
    })
}

/// Returns whether the selected set includes `set`. An invalid selection includes none.
pub(super) fn has(set: CpuInstructions) -> bool {
    selection().as_ref().is_ok_and(|&selected| selected >= set)
}

/// Returns the selected set's vectors.
pub(crate) fn vectors() -> Arch {
    match selection() {
        #[cfg(target_arch = "x86_64")]
        Ok(CpuInstructions::Avx2) => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
        Ok(CpuInstructions::Portable) | Err(_) => Arch::Scalar,
        Ok(_) => Arch::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_others_list_the_choices() {
        for set in CpuInstructions::available() {
            assert_eq!(set.name().parse::<CpuInstructions>().unwrap(), set);
        }
        let error = "sse9".parse::<CpuInstructions>().unwrap_err().to_string();
        assert!(
            error.contains("\"sse9\"") && error.contains("portable"),
            "{error}"
        );
    }
}
