//! Chooses an implementation.

use std::sync::Arc;

use candle_core::{Device, Result, bail};

use crate::launch;
#[cfg(feature = "mpi")]
use crate::launch::{Environment, Launcher};
use crate::{Alone, Collective};

/// Connects to the other ranks in the job whose launcher has started this process.
///
/// `device` is where the tensors are. Without a launcher, or with one rank, the result is
/// [`Alone`]. On a GPU it is `Nccl`, or `Mpi` if the program was built without the feature `nccl`.
/// On the CPU it is `Mpi`.
///
/// # Errors
///
/// Fails if there are several ranks but the program was built without the feature for them, or if
/// the launcher's variables contradict each other or the MPI ranks.
pub fn connect(device: &Device) -> Result<Arc<dyn Collective>> {
    match (launch::environment()?, device.is_cuda()) {
        (None, _) => Ok(Arc::new(Alone)),
        (Some(environment), _) if environment.world_size == 1 => Ok(Arc::new(Alone)),
        #[cfg(feature = "nccl")]
        (Some(environment), true) => Ok(crate::Nccl::connect(device, &environment)?),
        #[cfg(feature = "mpi")]
        (Some(environment), _) => Ok(mpi(&environment)?),
        #[cfg(not(feature = "mpi"))]
        (Some(environment), is_cuda) => bail!(
            "{}: {}, but this program was built without the feature{}",
            environment.launcher.world_size_variable(),
            environment.world_size,
            if is_cuda { "s nccl and mpi" } else { " mpi" }
        ),
    }
}

/// Connects to the MPI ranks, which must match the launcher's.
#[cfg(feature = "mpi")]
pub(crate) fn mpi(environment: &Environment) -> Result<Arc<crate::Mpi>> {
    let Environment {
        launcher,
        rank,
        world_size,
        ..
    } = *environment;
    let name = launcher.world_size_variable();
    if launcher == Launcher::Torchrun {
        bail!("{name}: {world_size}, but torchrun starts no ranks of MPI: use mpirun or srun");
    }
    let ranks = crate::Mpi::init()?;
    if (ranks.rank(), ranks.world_size()) != (rank, world_size) {
        bail!(
            "{name}: {world_size}, but MPI has {} ranks: use srun --mpi=pmix, or mpirun of the MPI \
             library that this program loads",
            ranks.world_size()
        );
    }
    Ok(ranks)
}
