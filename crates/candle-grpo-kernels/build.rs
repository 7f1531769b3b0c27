//! Compiles the CUDA kernels to PTX, which the driver turns into code for the GPU at hand.

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use std::path::PathBuf;

    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let headers = std::fs::read_dir("kernels")?
        .map(|entry| Ok(entry?.path()))
        .filter(|path: &std::io::Result<PathBuf>| {
            !matches!(path, Ok(path) if path.extension() != Some("cuh".as_ref()))
        })
        .collect::<std::io::Result<Vec<_>>>()?;
    println!("cargo::rerun-if-changed=build.rs");
    // A kernel that is new.
    println!("cargo::rerun-if-changed=kernels");
    // PTX for 8.0 runs on 8.0 and everything newer.
    cudaforge::KernelBuilder::new()
        .source_glob("kernels/*.cu")
        .watch(headers)
        .compute_cap(80)
        .arg("-O3")
        .arg("-std=c++17")
        .build_ptx()?
        .write(out.join("ptx.rs"))?;
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
