//! Environment variables in which launchers describe a job's ranks.

use candle_core::{Result, bail};

/// A program that starts a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// Open MPI's `mpirun`: `OMPI_COMM_WORLD_SIZE`, `OMPI_COMM_WORLD_RANK` and
    /// `OMPI_COMM_WORLD_LOCAL_RANK`.
    OpenMpi,
    /// `mpirun` from MPICH or Intel MPI, or `srun --mpi=pmi2`: `PMI_SIZE`, `PMI_RANK`, and
    /// `MPI_LOCALRANKID` or `SLURM_LOCALID`.
    Pmi,
    /// torchrun and compatible launchers: `WORLD_SIZE`, `RANK` and `LOCAL_RANK`.
    Torchrun,
    /// Slurm's `srun`: `SLURM_STEP_NUM_TASKS`, `SLURM_PROCID` and `SLURM_LOCALID`. Slurm also sets
    /// `SLURM_NTASKS` in scripts that are not ranks, so it is ignored here.
    Slurm,
}

impl Launcher {
    const ALL: [Self; 4] = [Self::OpenMpi, Self::Pmi, Self::Torchrun, Self::Slurm];

    /// The variable with the number of ranks.
    pub fn world_size_variable(self) -> &'static str {
        match self {
            Self::OpenMpi => "OMPI_COMM_WORLD_SIZE",
            Self::Pmi => "PMI_SIZE",
            Self::Torchrun => "WORLD_SIZE",
            Self::Slurm => "SLURM_STEP_NUM_TASKS",
        }
    }

    /// The variable with this rank's number.
    pub fn rank_variable(self) -> &'static str {
        match self {
            Self::OpenMpi => "OMPI_COMM_WORLD_RANK",
            Self::Pmi => "PMI_RANK",
            Self::Torchrun => "RANK",
            Self::Slurm => "SLURM_PROCID",
        }
    }

    /// The variables with this rank's number on its machine. The first one that is set counts.
    fn local_rank_variables(self) -> &'static [&'static str] {
        match self {
            Self::OpenMpi => &["OMPI_COMM_WORLD_LOCAL_RANK"],
            Self::Pmi => &["MPI_LOCALRANKID", "SLURM_LOCALID"],
            Self::Torchrun => &["LOCAL_RANK"],
            Self::Slurm => &["SLURM_LOCALID"],
        }
    }
}

/// This process's place in its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Environment {
    /// The launcher whose variables are set.
    pub launcher: Launcher,
    /// This process's number, below `world_size`.
    pub rank: usize,
    /// The number of processes, at least 1.
    pub world_size: usize,
    /// This process's number among those on its machine. It selects the GPU.
    pub local_rank: usize,
}

impl Environment {
    /// Reads variables by name through `variable`. Returns `None` if no launcher has set any.
    ///
    /// If several launchers have set theirs, the first in this order counts: Open MPI, PMI,
    /// torchrun, Slurm. On several machines, `mpirun` and torchrun start through `srun`, whose
    /// variables then describe machines. `RANK` and `WORLD_SIZE` must agree with MPI's.
    ///
    /// # Errors
    ///
    /// Fails if a variable is missing, is not a number in its range, or contradicts another one.
    /// The error names the variable.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let mut found: Option<Self> = None;
        for launcher in Launcher::ALL {
            if found.is_some() && launcher != Launcher::Torchrun {
                continue;
            }
            let Some(environment) = Self::of(launcher, &variable)? else {
                continue;
            };
            let Some(first) = found else {
                found = Some(environment);
                continue;
            };
            let same = |name: &str, value: usize, first_name: &str, first: usize| {
                if value != first {
                    bail!("{name}: {value}, must be {first} as {first_name}");
                }
                Ok(())
            };
            let (name, first_name) = (
                launcher.world_size_variable(),
                first.launcher.world_size_variable(),
            );
            same(name, environment.world_size, first_name, first.world_size)?;
            let (name, first_name) = (launcher.rank_variable(), first.launcher.rank_variable());
            same(name, environment.rank, first_name, first.rank)?;
        }
        Ok(found)
    }

    /// Returns this rank's GPU number among the `visible` ones. This is its local rank, or 0 if the
    /// launcher or container shows each rank a single GPU.
    ///
    /// # Errors
    ///
    /// Fails if the rank sees several GPUs, but not enough for the earlier ranks on its machine and
    /// itself.
    pub fn gpu(&self, visible: usize) -> Result<usize> {
        let Self { local_rank, .. } = *self;
        match visible {
            1 => Ok(0),
            _ if local_rank < visible => Ok(local_rank),
            _ => bail!(
                "local rank {local_rank}: sees {visible} GPUs, must see one of its own or at least {}: start one rank \
                 for each GPU of the machine, or show each rank one GPU with CUDA_VISIBLE_DEVICES or srun --gpus-per-task=1",
                local_rank + 1
            ),
        }
    }

    /// Reads one launcher's variables. `None` if neither the rank nor the number of ranks is set.
    fn of(launcher: Launcher, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(value) = variable(name) else {
                return Ok(None);
            };
            match value.trim().parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => bail!("{name}: {value:?}, must be a number of at least 0"),
            }
        };
        let (size_name, rank_name) = (launcher.world_size_variable(), launcher.rank_variable());
        let (world_size, rank) = match (number(size_name)?, number(rank_name)?) {
            (Some(world_size), Some(rank)) => (world_size, rank),
            // Slurm also sets SLURM_PROCID in scripts that are not ranks.
            (None, None) => return Ok(None),
            (None, Some(_)) if launcher == Launcher::Slurm => return Ok(None),
            (None, Some(_)) => {
                bail!("{size_name}: not set, must be the number of ranks as {rank_name} is set")
            }
            (Some(_), None) => {
                bail!("{rank_name}: not set, must be the number of this rank as {size_name} is set")
            }
        };
        if world_size == 0 {
            bail!("{size_name}: 0, must be at least 1");
        }
        if rank >= world_size {
            bail!("{rank_name}: {rank}, must be below {world_size}, the value of {size_name}");
        }
        let names = launcher.local_rank_variables();
        let mut local_rank = None;
        for name in names {
            if local_rank.is_none() {
                local_rank = number(name)?.map(|number| (name, number));
            }
        }
        let Some((name, local_rank)) = local_rank else {
            bail!(
                "{}: not set, must be the number of this rank on its machine as {rank_name} is set",
                names[0]
            );
        };
        if local_rank >= world_size {
            bail!("{name}: {local_rank}, must be below {world_size}, the value of {size_name}");
        }
        Ok(Some(Self {
            launcher,
            rank,
            world_size,
            local_rank,
        }))
    }
}

/// Returns this process's place in its job, or `None` if no launcher has started it.
///
/// # Errors
///
/// Same as [`Environment::from_variables`].
pub fn environment() -> Result<Option<Environment>> {
    Environment::from_variables(variable)
}

/// Where ranks find rank 0 over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Master {
    /// Name or address of rank 0's machine, `MASTER_ADDR`.
    pub address: String,
    /// The port after `MASTER_PORT`, where rank 0 listens. torchrun itself listens on
    /// `MASTER_PORT`.
    pub id_port: u16,
}

impl Master {
    /// Reads `MASTER_ADDR` and `MASTER_PORT` through `variable`. Returns `None` if neither is set.
    ///
    /// # Errors
    ///
    /// Fails if only one of them is set, or if the port is not a number from 1 to 65534.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        match (variable("MASTER_ADDR"), variable("MASTER_PORT")) {
            (None, None) => Ok(None),
            (Some(_), None) => bail!("MASTER_PORT: not set, must be a port as MASTER_ADDR is set"),
            (None, Some(_)) => {
                bail!("MASTER_ADDR: not set, must be the machine of rank 0 as MASTER_PORT is set")
            }
            (Some(address), Some(port)) => match port.trim().parse() {
                Ok(port) if (1..u16::MAX).contains(&port) => Ok(Some(Self {
                    address,
                    id_port: port + 1,
                })),
                _ => bail!("MASTER_PORT: {port:?}, must be a number from 1 to 65534"),
            },
        }
    }
}

/// Returns where to find rank 0, or `None` if the launcher has not set it.
///
/// # Errors
///
/// Same as [`Master::from_variables`].
pub fn master() -> Result<Option<Master>> {
    Master::from_variables(variable)
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}
