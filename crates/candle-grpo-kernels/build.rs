//! Compiles each `.cu` file to a fatbin.

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use std::path::PathBuf;

    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let files = std::fs::read_dir("kernels")?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<Vec<_>>>()?;
    let with_extension = |extension: &str| {
        let is_one = |path: &&PathBuf| path.extension() == Some(extension.as_ref());
        files.iter().filter(is_one).cloned().collect::<Vec<_>>()
    };
    let sources = with_extension("cu");
    println!("cargo::rerun-if-changed=build.rs");
    // Detects new kernels.
    println!("cargo::rerun-if-changed=kernels");
    let toolkit = cudaforge::CudaToolkit::detect()?;
    if !has_blackwell(toolkit.version.as_deref()) {
        let version = toolkit.version.as_deref().unwrap_or("an unknown version");
        let nvcc = toolkit.nvcc_path.display();
        return Err(format!("{nvcc}: CUDA {version}, must be 12.8 or newer").into());
    }
    let nvcc = toolkit.nvcc_path;
    // PTX for 8.0 runs on 8.0 and newer.
    cudaforge::KernelBuilder::new()
        .source_files(&sources)
        .watch(with_extension("cuh"))
        // The arguments in `fatbin`.
        .watch(["build.rs"])
        .compute_cap(80)
        .arg("-O3")
        .arg("-std=c++17")
        .build_ptx()?;

    let mut names: Vec<_> = sources.iter().filter_map(|path| path.file_stem()).collect();
    names.sort();
    std::thread::scope(|scope| {
        let threads: Vec<_> = names
            .iter()
            .map(|name| {
                let (nvcc, kernel) = (&nvcc, out.join(name));
                scope.spawn(move || fatbin(nvcc, &kernel))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err("a panic".to_owned())))
    })?;
    let table: String = names
        .iter()
        .map(|name| format!("({name:?}, include_bytes!(\"{}.fatbin\")),", name.display()))
        .collect();
    std::fs::write(out.join("fatbins.rs"), format!("&[{table}]"))?;
    Ok(())
}

/// Compute capabilities with machine code. A GPU runs that with its major version, and others
/// compile the PTX. scripts/cuda-kernels reads this line and the next constant.
#[cfg(feature = "cuda")]
const MACHINE_CODE: &[&str] = &["80", "90", "100", "120"];

/// Kernels with separate code for compute capability 9.0, whose instructions no other GPU has.
#[cfg(feature = "cuda")]
const FOR_HOPPER: &[&str] = &["attention"];

/// Returns whether this version of CUDA compiles for each compute capability in `MACHINE_CODE`.
#[cfg(feature = "cuda")]
fn has_blackwell(version: Option<&str>) -> bool {
    let numbers = version.and_then(|version| {
        let (major, minor) = version.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    });
    numbers.is_some_and(|numbers| numbers >= (12, 8))
}

/// Writes the kernel's fatbin unless it is newer than the PTX.
#[cfg(feature = "cuda")]
fn fatbin(nvcc: &std::path::Path, kernel: &std::path::Path) -> Result<(), String> {
    let [ptx, partial, fatbin] = ["ptx", "partial", "fatbin"].map(|end| kernel.with_extension(end));
    let changed = |path| std::fs::metadata(path).and_then(|data| data.modified());
    if let (Ok(ptx), Ok(fatbin)) = (changed(&ptx), changed(&fatbin))
        && ptx <= fatbin
    {
        return Ok(());
    }
    let mut command = std::process::Command::new(nvcc);
    // Compiles the code for all GPUs at the same time.
    command
        .args(["--fatbin", "--threads", "0", "-o"])
        .arg(&partial);
    let name = kernel.file_name().and_then(|name| name.to_str());
    let for_hopper = name.filter(|name| FOR_HOPPER.contains(name));
    let codes: String = MACHINE_CODE
        .iter()
        .filter(|code| **code != "90" || for_hopper.is_none())
        .map(|code| format!(",sm_{code}"))
        .collect();
    command.args([
        "-gencode",
        &format!("arch=compute_80,code=[compute_80{codes}]"),
    ]);
    match for_hopper {
        Some(name) => command
            .args(["-gencode", "arch=compute_90a,code=sm_90a"])
            .args(["-O3", "-std=c++17"])
            .arg(format!("kernels/{name}.cu")),
        None => command.arg(&ptx),
    };
    let status = command
        .status()
        .map_err(|error| format!("{}: {error}", nvcc.display()))?;
    if !status.success() {
        return Err(format!("nvcc of {}: {status}", ptx.display()));
    }
    std::fs::rename(&partial, &fatbin).map_err(|error| format!("{}: {error}", fatbin.display()))
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
