//! A process's place in its job, from its launcher's variables.

use candle_core::Result;
use candle_grpo_collective::launch::{Environment, Launcher, Master};
use candle_grpo_test_support::message;

fn read(variables: &str) -> Result<Option<Environment>> {
    Environment::from_variables(variable(variables))
}

/// A variable's value in text such as `RANK=0 WORLD_SIZE=2`.
fn variable(variables: &str) -> impl Fn(&str) -> Option<String> {
    move |name| {
        let mut values = variables
            .split(' ')
            .filter_map(|variable| variable.split_once('='));
        values
            .find(|(other, _)| *other == name)
            .map(|(_, value)| value.to_owned())
    }
}

fn place(
    launcher: Launcher,
    rank: usize,
    world_size: usize,
    local_rank: usize,
) -> Option<Environment> {
    Some(Environment {
        launcher,
        rank,
        world_size,
        local_rank,
    })
}

const OPEN_MPI: &str = "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1";
const SLURM: &str = "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0";

#[test]
fn each_launcher_has_its_variables() -> Result<()> {
    assert_eq!(read(OPEN_MPI)?, place(Launcher::OpenMpi, 3, 4, 1));
    let hydra = "PMI_SIZE=2 PMI_RANK=1 MPI_LOCALRANKID=1";
    assert_eq!(read(hydra)?, place(Launcher::Pmi, 1, 2, 1));
    let pmi2 = "PMI_SIZE=2 PMI_RANK=1 SLURM_LOCALID=0";
    assert_eq!(read(pmi2)?, place(Launcher::Pmi, 1, 2, 0));
    let torchrun = "WORLD_SIZE=8 RANK=5 LOCAL_RANK=5 MASTER_ADDR=host MASTER_PORT=29500";
    assert_eq!(read(torchrun)?, place(Launcher::Torchrun, 5, 8, 5));
    assert_eq!(read(SLURM)?, place(Launcher::Slurm, 1, 2, 0));
    Ok(())
}

#[test]
fn a_rank_has_the_gpu_of_its_local_rank_or_the_only_one_that_it_sees() -> Result<()> {
    for (local_rank, visible, expected) in [
        // A machine whose ranks see all GPUs.
        (0, 8, 0),
        (3, 8, 3),
        (7, 8, 7),
        (0, 1, 0),
        // Slurm or a container shows each rank one GPU.
        (1, 1, 0),
        (7, 1, 0),
    ] {
        let rank = place(Launcher::Slurm, 7, 8, local_rank).unwrap();
        assert_eq!(rank.gpu(visible)?, expected, "{local_rank} of {visible}");
    }
    Ok(())
}

#[test]
fn a_rank_without_a_gpu_is_named() {
    for (local_rank, visible, words) in [
        (
            2,
            2,
            "local rank 2: sees 2 GPUs, must see one of its own or at least 3: ",
        ),
        (
            7,
            4,
            "local rank 7: sees 4 GPUs, must see one of its own or at least 8: ",
        ),
        (
            0,
            0,
            "local rank 0: sees 0 GPUs, must see one of its own or at least 1: ",
        ),
        (
            1,
            0,
            "local rank 1: sees 0 GPUs, must see one of its own or at least 2: ",
        ),
    ] {
        let rank = place(Launcher::Torchrun, 7, 8, local_rank).unwrap();
        let text = message(rank.gpu(visible));
        assert!(text.contains(words), "{text}");
        assert!(text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
    }
}

#[test]
fn a_process_that_no_launcher_started_has_no_place() -> Result<()> {
    assert_eq!(read("")?, None);
    // An sbatch script, which is not a rank.
    assert_eq!(read("SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0")?, None);
    Ok(())
}

#[test]
fn the_inner_launcher_counts() -> Result<()> {
    // mpirun and torchrun start a process on each machine with srun.
    assert_eq!(
        read(&format!("{SLURM} {OPEN_MPI}"))?,
        place(Launcher::OpenMpi, 3, 4, 1)
    );
    let torchrun = format!("{SLURM} WORLD_SIZE=16 RANK=9 LOCAL_RANK=1");
    assert_eq!(read(&torchrun)?, place(Launcher::Torchrun, 9, 16, 1));
    // A script that sets torchrun's variables from MPI's.
    let both = format!("{OPEN_MPI} WORLD_SIZE=4 RANK=3 LOCAL_RANK=1");
    assert_eq!(read(&both)?, place(Launcher::OpenMpi, 3, 4, 1));
    Ok(())
}

#[test]
fn bad_variables_are_errors_that_name_them() {
    for (variables, expected) in [
        ("WORLD_SIZE=2", "RANK: not set"),
        ("RANK=0", "WORLD_SIZE: not set"),
        ("WORLD_SIZE=2 RANK=1", "LOCAL_RANK: not set"),
        (
            "WORLD_SIZE=two RANK=1 LOCAL_RANK=0",
            "WORLD_SIZE: \"two\", must be a number",
        ),
        (
            "WORLD_SIZE=2 RANK=-1 LOCAL_RANK=0",
            "RANK: \"-1\", must be a number",
        ),
        (
            "WORLD_SIZE=0 RANK=0 LOCAL_RANK=0",
            "WORLD_SIZE: 0, must be at least 1",
        ),
        (
            "WORLD_SIZE=2 RANK=2 LOCAL_RANK=0",
            "RANK: 2, must be below 2, the value of WORLD_SIZE",
        ),
        (
            "WORLD_SIZE=2 RANK=1 LOCAL_RANK=2",
            "LOCAL_RANK: 2, must be below 2",
        ),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK: not set"),
        ("PMI_SIZE=2 PMI_RANK=0", "MPI_LOCALRANKID: not set"),
        ("SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID: not set"),
    ] {
        let error = message(read(variables));
        assert!(error.contains(expected), "{variables}: {error}");
    }
    for (variables, expected) in [
        (
            "WORLD_SIZE=2 RANK=1 LOCAL_RANK=1",
            "WORLD_SIZE: 2, must be 4 as OMPI_COMM_WORLD_SIZE",
        ),
        (
            "WORLD_SIZE=4 RANK=1 LOCAL_RANK=1",
            "RANK: 1, must be 3 as OMPI_COMM_WORLD_RANK",
        ),
    ] {
        let error = message(read(&format!("{OPEN_MPI} {variables}")));
        assert!(error.contains(expected), "{variables}: {error}");
    }
}

#[test]
fn rank_0_is_at_the_address_and_the_next_port() -> Result<()> {
    let read = |variables| Master::from_variables(variable(variables));
    assert_eq!(read("")?, None);
    let master = Master {
        address: "node1".to_owned(),
        id_port: 29501,
    };
    assert_eq!(read("MASTER_ADDR=node1 MASTER_PORT=29500")?, Some(master));
    for (variables, expected) in [
        ("MASTER_ADDR=node1", "MASTER_PORT: not set"),
        ("MASTER_PORT=29500", "MASTER_ADDR: not set"),
        (
            "MASTER_ADDR=node1 MASTER_PORT=0",
            "MASTER_PORT: \"0\", must be a number from 1 to 65534",
        ),
        (
            "MASTER_ADDR=node1 MASTER_PORT=65535",
            "MASTER_PORT: \"65535\"",
        ),
        (
            "MASTER_ADDR=node1 MASTER_PORT=http",
            "MASTER_PORT: \"http\"",
        ),
    ] {
        let error = message(read(variables));
        assert!(error.contains(expected), "{variables}: {error}");
    }
    Ok(())
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_job_of_several_ranks_needs_a_feature() -> Result<()> {
    use candle_core::Device;
    use candle_grpo_collective::connect;

    const NAME: &str = "a_job_of_several_ranks_needs_a_feature";
    // The test starts itself as rank 0 of 2.
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").is_some() {
        println!("{}", message(connect(&Device::Cpu).map(|_| ())));
        return Ok(());
    }
    assert_eq!(connect(&Device::Cpu)?.world_size(), 1);
    let child = std::process::Command::new(std::env::current_exe()?)
        .args(["--exact", NAME, "--nocapture"])
        .envs([
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ])
        .output()?;
    let output = String::from_utf8_lossy(&child.stdout);
    let expected = "OMPI_COMM_WORLD_SIZE: 2, but this program was built without the feature mpi";
    assert!(output.contains(expected), "{output}");
    Ok(())
}
