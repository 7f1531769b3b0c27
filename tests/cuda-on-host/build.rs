//! Compiles `kernels/*.cu` as C++, with `kernels/host` as replacement of nvcc's built-ins.

use std::path::Path;

fn main() {
    // Read at run time: checkouts that share a target folder share compiled build scripts.
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let kernels = Path::new(&here).join("../../kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    println!("cargo::rerun-if-changed=src/wrong.cu");

    let mut sources: Vec<_> = std::fs::read_dir(&kernels)
        .expect("kernels/ is beside tests/")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    sources.push("src/wrong.cu".into());

    checked(&kernels).files(sources).compile("kernels_on_host");

    // The kernels of compute capability 9.0, under other names: see `on_hopper`.
    let mut for_hopper = checked(&kernels);
    for scores in ["", "scored_"] {
        for pass in ["forward", "of_query", "of_key"] {
            for width in [64, 128, 256] {
                for dtype in ["f32", "bf16", "f16"] {
                    let name = format!("{scores}attention_{pass}_{width}_{dtype}");
                    for_hopper.define(&name, format!("hopper_{name}").as_str());
                }
            }
        }
    }
    for_hopper
        .define("__CUDA_ARCH_FEAT_SM90_ALL", None)
        .file(kernels.join("attention.cu"))
        // Only `dlsym` names the kernels.
        .link_lib_modifier("+whole-archive")
        .compile("kernels_for_hopper");
    cpp(&kernels)
        .opt_level(3)
        .include(kernels.join("host/driver"))
        .files(
            ["cuda_host.cpp", "races.cpp", "asynchronous.cpp"]
                .map(|name| kernels.join("host").join(name)),
        )
        .file(kernels.join("host/driver/cuda.cpp"))
        .file(kernels.join("host/driver/cublas.cpp"))
        .compile("cuda_host");
    // Modules that the driver loads call functions of cuda_host.cpp. With `-rdynamic` the linker
    // would keep all of Candle, which calls functions that the emulated libraries lack.
    for names in [
        "cuda_host*",
        "_ZN9cuda_host*",
        "*Idx",
        "*Dim",
        "hopper_*",
        "__ubsan_handle_*",
        "__tsan_*",
    ] {
        println!("cargo::rustc-link-arg-tests=-Wl,--export-dynamic-symbol={names}");
    }
}

/// Functions of kernels/host report undefined behavior and races, so no sanitizer runtime is
/// linked.
fn checked(kernels: &Path) -> cc::Build {
    let mut build = cpp(kernels);
    build
        // The compiler takes half of the time of level 2, and the tests a tenth more.
        .opt_level(1)
        // Kernels read elements of one type as packs of another, which nvcc allows.
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .flag("-include")
        .flag("cuda_host.h")
        .flag("-fsanitize=undefined")
        .flag("-fno-sanitize=vptr")
        .flag("-fno-sanitize-recover=all");
    // A loop that became a call of memset would have no hooks of races.cpp.
    for flag in [
        "-fsanitize=thread",
        "--param=tsan-instrument-func-entry-exit=0",
        "-fno-tree-loop-distribute-patterns",
    ] {
        build.flag(flag);
    }
    build
}

fn cpp(kernels: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .flag("-x")
        .flag("c++")
        .include(kernels.join("host/include"))
        .opt_level(2)
        .warnings_into_errors(true)
        .extra_warnings(true);
    build
}
