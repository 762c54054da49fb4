//! Compiles the kernels: with the feature `emulated` by the C++ compiler into a library that runs them on the CPU, with `cuda` by
//! nvcc into one image a source. With neither: nothing.

use std::process::ExitCode;

#[cfg(not(any(feature = "cuda", feature = "emulated")))]
fn main() -> ExitCode {
    println!("cargo:rerun-if-changed=build.rs");
    ExitCode::SUCCESS
}

#[cfg(any(feature = "cuda", feature = "emulated"))]
fn main() -> ExitCode {
    let compile = || {
        let sources = sources::Sources::find()?;
        #[cfg(feature = "emulated")]
        emulated::compile(&sources)?;
        #[cfg(feature = "cuda")]
        cuda::compile(&sources)?;
        Ok::<_, String>(())
    };
    match compile() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(any(feature = "cuda", feature = "emulated"))]
mod sources {
    use std::env;
    use std::ffi::OsStr;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, PoisonError};

    pub(crate) struct Sources {
        /// The folder `kernels/` of the repository.
        pub(crate) dir: PathBuf,
        /// The kernels' sources in it, sorted.
        pub(crate) kernels: Vec<PathBuf>,
        pub(crate) out: PathBuf,
    }

    impl Sources {
        pub(crate) fn find() -> Result<Self, String> {
            let manifest = env::var_os("CARGO_MANIFEST_DIR").ok_or("this is not run by cargo")?;
            let out = env::var_os("OUT_DIR").ok_or("this is not run by cargo")?;
            let dir = Path::new(&manifest).join("../../kernels");
            let dir =
                dir.canonicalize().map_err(|error| format!("cannot find {}: {error}", dir.display()))?;
            println!("cargo:rerun-if-changed=build.rs");
            let entries =
                std::fs::read_dir(&dir).map_err(|error| format!("cannot list {}: {error}", dir.display()))?;
            let is = |path: &PathBuf, extension: &str| path.extension() == Some(OsStr::new(extension));
            let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
            let mut kernels: Vec<PathBuf> = paths.filter(|path| is(path, "cu") || is(path, "h")).collect();
            println!("cargo:rerun-if-changed={}", dir.join("shim").display());
            for path in &kernels {
                println!("cargo:rerun-if-changed={}", path.display());
            }
            kernels.retain(|path| is(path, "cu"));
            kernels.sort();
            Ok(Self { dir, kernels, out: out.into() })
        }
    }

    /// Runs commands, as many at once as cargo allows; returns what each wrote on stderr.
    pub(crate) fn run_all(commands: Vec<Command>) -> Result<Vec<String>, String> {
        let at_once = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1usize);
        let results: Vec<Mutex<Result<String, String>>> =
            commands.iter().map(|_| Mutex::new(Err("was not run".to_owned()))).collect();
        let commands: Vec<Mutex<Command>> = commands.into_iter().map(Mutex::new).collect();
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..at_once.clamp(1, 16) {
                scope.spawn(|| {
                    loop {
                        let mine = next.fetch_add(1, Ordering::Relaxed);
                        let (Some(command), Some(result)) = (commands.get(mine), results.get(mine)) else {
                            return;
                        };
                        let mut command = command.lock().unwrap_or_else(PoisonError::into_inner);
                        *result.lock().unwrap_or_else(PoisonError::into_inner) = run(&mut command);
                    }
                });
            }
        });
        results
            .into_iter()
            .map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner))
            .collect()
    }

    fn run(command: &mut Command) -> Result<String, String> {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let line = words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ");
        let output = command.output().map_err(|error| format!("cannot run `{line}`: {error}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() {
            Ok(said)
        } else {
            Err(format!("`{line}` failed ({}):\n{said}", output.status))
        }
    }
}

#[cfg(feature = "emulated")]
mod emulated {
    use std::process::Command;

    use super::sources::{Sources, run_all};

    /// Makes `$OUT_DIR/libkernels.so`.
    pub(crate) fn compile(sources: &Sources) -> Result<(), String> {
        let mut build = cc::Build::new();
        #[cfg(target_arch = "x86_64")]
        if std::env::var("HOST") == std::env::var("TARGET") && std::arch::is_x86_feature_detected!("fma") {
            // As a call of the C library, fmaf is most of what a test waits for.
            build.flag("-mfma");
        }
        let compiler = build
            .cpp(true)
            .std("c++17")
            .opt_level(2)
            .debug(false)
            .pic(true)
            .include(&sources.dir)
            // The order and rounding of every operation are part of what is tested.
            .flag("-ffp-contract=off")
            .flag("-fvisibility=hidden")
            // Elements are loaded and stored several at a time.
            .flag("-fno-strict-aliasing")
            .flag("-Wno-unknown-pragmas")
            .warnings_into_errors(true)
            .extra_warnings(true)
            .try_get_compiler()
            .map_err(|error| format!("the feature `emulated` needs a C++ compiler: {error}"))?;
        let mut objects = Vec::new();
        let mut commands = Vec::new();
        let shim = sources.dir.join("shim/cuda_on_cpu.cpp");
        for source in sources.kernels.iter().chain([&shim]) {
            let object = sources.out.join(source.file_name().unwrap_or_default()).with_extension("o");
            let mut command = compiler.to_command();
            command.args(["-x", "c++", "-c"]).arg(source).arg("-o").arg(&object);
            commands.push(command);
            objects.push(object);
        }
        run_all(commands)?;
        let library = sources.out.join("libkernels.so");
        let mut link: Command = compiler.to_command();
        link.arg("-shared").args(&objects).arg("-o").arg(&library);
        run_all(vec![link])?;
        println!("cargo:rustc-env=MICROSERVING_EMULATED_KERNELS={}", library.display());
        Ok(())
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::env;
    use std::fmt::Write as _;
    use std::process::Command;

    use super::sources::{Sources, run_all};

    /// Machine code for these; PTX of the last for whatever comes later.
    const ARCHITECTURES: [&str; 2] = ["80", "90"];

    /// Makes `$OUT_DIR/NAME.fatbin` for each source, keeps what ptxas says of it in `NAME.ptxas`, and embeds the images by
    /// `images.rs`. With `NVCC=none` there are no images: enough for lints, and to see what a program says without a GPU.
    pub(crate) fn compile(sources: &Sources) -> Result<(), String> {
        println!("cargo:rerun-if-env-changed=NVCC");
        println!("cargo:rerun-if-env-changed=PATH");
        let nvcc = env::var_os("NVCC").unwrap_or_else(|| "nvcc".into());
        if nvcc == "none" {
            return embed(sources, "&[]\n");
        }
        let mut commands = Vec::new();
        let mut names = Vec::new();
        for source in &sources.kernels {
            let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let mut command = Command::new(&nvcc);
            command.args([
                "-std=c++17",
                "-O3",
                "-fmad=false",
                "-Werror",
                "all-warnings",
                "-Xptxas",
                "-v",
                "-fatbin",
            ]);
            for architecture in ARCHITECTURES {
                command.arg("-gencode").arg(format!("arch=compute_{architecture},code=sm_{architecture}"));
            }
            let last = ARCHITECTURES[ARCHITECTURES.len() - 1];
            command.arg("-gencode").arg(format!("arch=compute_{last},code=compute_{last}"));
            command.arg("-I").arg(&sources.dir).arg(source);
            command.arg("-o").arg(sources.out.join(format!("{name}.fatbin")));
            commands.push(command);
            names.push(name);
        }
        let said = run_all(commands).map_err(|error| {
            format!("{error}\nthe feature `cuda` needs nvcc, by NVCC or on PATH; `cargo xtask kernels` installs one")
        })?;
        let mut images = String::from("&[\n");
        for (name, said) in names.iter().zip(said) {
            let report = sources.out.join(format!("{name}.ptxas"));
            std::fs::write(&report, said)
                .map_err(|error| format!("cannot write {}: {error}", report.display()))?;
            let image = sources.out.join(format!("{name}.fatbin"));
            let _ = writeln!(
                images,
                "    ({name:?}, &Aligned(*include_bytes!({:?}))),",
                image.display().to_string()
            );
        }
        images.push_str("]\n");
        embed(sources, &images)
    }

    fn embed(sources: &Sources, images: &str) -> Result<(), String> {
        let file = sources.out.join("images.rs");
        std::fs::write(&file, images).map_err(|error| format!("cannot write {}: {error}", file.display()))
    }
}
