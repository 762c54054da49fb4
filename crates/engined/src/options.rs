//! The options of `engined`, each declared once.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use microserving_daemon::{ByteSize, Daemon, DaemonOptions, positive_seconds, seconds};

/// Serves one model on one device over HTTP: the MicroServing calls and the OpenAI API.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "engined",
    version,
    after_help = "`engined worker --front PATH` runs the device half of an engine that was started with `--worker PATH`."
)]
pub(crate) struct Options {
    /// Model to serve: `toy`, a GGUF file, a directory in the Hugging Face layout, or `hf:OWNER/NAME` (feature `hub`).
    #[arg(long, env = "MICROSERVING_MODEL", value_name = "MODEL", help_heading = "Model")]
    pub(crate) model: String,

    /// Name of the model in the API; by default the one in its files.
    #[arg(long, env = "MICROSERVING_SERVED_MODEL_NAME", value_name = "NAME", help_heading = "Model")]
    pub(crate) served_model_name: Option<String>,

    /// Form that weights are kept in; by default `auto`: the file's own, quantised types without kernels as `q8_0`; on a GPU `f16` where
    /// the file has no other, else `bf16`. Not for the toy model.
    #[arg(long, env = "MICROSERVING_DTYPE", value_name = "DTYPE", help_heading = "Model")]
    pub(crate) dtype: Option<WeightForm>,

    /// Element type of the KV cache; by default `f16`, on a GPU that of the weights. Not for the toy model.
    #[arg(long, env = "MICROSERVING_KV_DTYPE", value_name = "DTYPE", help_heading = "Model")]
    pub(crate) kv_dtype: Option<KvForm>,

    /// Device that computes; `auto` takes a GPU if there is one and this build has the feature `cuda`, else the processor.
    #[arg(
        long,
        env = "MICROSERVING_DEVICE",
        value_name = "DEVICE",
        default_value = "auto",
        help_heading = "Model"
    )]
    pub(crate) device: Device,

    /// Threads that compute at most; by default as many as there are cores. The toy model takes one.
    #[arg(long, env = "MICROSERVING_THREADS", value_name = "N", help_heading = "Model",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,

    /// Keep each thread that computes on a core of its own: for a machine that does nothing else. Not for the toy model.
    #[arg(long, env = "MICROSERVING_PIN_THREADS", help_heading = "Model")]
    pub(crate) pin_threads: bool,

    /// Longest sequence in tokens, prompt and output together; by default what the model was made for.
    #[arg(long, env = "MICROSERVING_MAX_CONTEXT", value_name = "TOKENS", help_heading = "Model",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_context: Option<u32>,

    /// Milliseconds that each step of the toy model takes, as a stand-in for a slower device; by default 0.
    #[arg(long, env = "MICROSERVING_TOY_STEP_MS", value_name = "MS", help_heading = "Model",
          value_parser = clap::value_parser!(u32).range(0..=60_000))]
    pub(crate) toy_step_ms: Option<u32>,

    /// Tokens in a KV page. All engines that exchange KV must agree.
    #[arg(long, env = "MICROSERVING_PAGE_SIZE", value_name = "TOKENS", default_value = "16",
          help_heading = "KV cache", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) page_size: u32,

    /// Pages of the KV cache; instead of --kv-bytes.
    #[arg(
        long,
        env = "MICROSERVING_NUM_PAGES",
        value_name = "N",
        help_heading = "KV cache",
        conflicts_with = "kv_bytes"
    )]
    pub(crate) num_pages: Option<NonZeroU32>,

    /// Memory for the KV cache, in bytes or with a unit (512MiB, 2GB); by default 1 GiB, or less where 32 sequences of full length need less.
    #[arg(long, env = "MICROSERVING_KV_BYTES", value_name = "BYTES", help_heading = "KV cache")]
    pub(crate) kv_bytes: Option<ByteSize>,

    /// Tokens computed in a step at most, over all sequences.
    #[arg(long, env = "MICROSERVING_MAX_BATCH_TOKENS", value_name = "TOKENS", default_value = "512",
          help_heading = "Scheduling", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_batch_tokens: u32,

    /// Milliseconds that a step should take at most: prefill chunks are cut to fit. 0 is as long as it likes. By default 100, and 0 for
    /// the toy model.
    #[arg(long, env = "MICROSERVING_MAX_STEP_MILLISECONDS", value_name = "MS", help_heading = "Scheduling",
          value_parser = clap::value_parser!(u32).range(0..=600_000))]
    pub(crate) max_step_milliseconds: Option<u32>,

    /// Sequences prefilled or decoded at a time.
    #[arg(long, env = "MICROSERVING_MAX_RUNNING", value_name = "N", default_value = "64",
          help_heading = "Scheduling", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_running: u32,

    /// Sequences that may wait for their first step; more are answered 503.
    #[arg(long, env = "MICROSERVING_MAX_WAITING", value_name = "N", default_value = "1024",
          help_heading = "Scheduling", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_waiting: u32,

    /// Seconds that a request may take whose caller sets no deadline; 0 is for ever.
    #[arg(long, env = "MICROSERVING_TIMEOUT_SECONDS", value_name = "SECONDS", default_value = "600",
          help_heading = "Scheduling", value_parser = seconds)]
    pub(crate) timeout_seconds: Duration,

    /// Measure what this engine takes, print it, write it as a profile, and exit. Serves nobody meanwhile.
    #[arg(long, env = "MICROSERVING_CALIBRATE", help_heading = "Cost")]
    pub(crate) calibrate: bool,

    /// Profile to tell routers, or to write with --calibrate; by default the one in the user's cache for this model, numeric mode and
    /// machine.
    #[arg(long, env = "MICROSERVING_PROFILE", value_name = "FILE", help_heading = "Cost")]
    pub(crate) profile: Option<PathBuf>,

    /// Address to serve on; port 0 takes a free one.
    #[arg(
        long,
        env = "MICROSERVING_LISTEN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:8001",
        help_heading = "Cluster"
    )]
    pub(crate) listen: String,

    /// Serve REST only. By default the calls are served over gRPC too, at the same address.
    #[arg(long, env = "MICROSERVING_NO_GRPC", help_heading = "Cluster")]
    pub(crate) no_grpc: bool,

    /// Name of this engine, unique in the cluster; by default drawn at start.
    #[arg(long, env = "MICROSERVING_ENGINE_ID", value_name = "NAME", help_heading = "Cluster")]
    pub(crate) engine_id: Option<String>,

    /// How KV travels between engines: `shm` between processes of one host; `nixl` between hosts (with --nixl-listen); `openshmem` between
    /// the processes that `oshrun` started; `nvshmem` between GPUs (feature `nvshmem`, with the --world options); `loopback` within this
    /// process only. docs/transport.md.
    #[arg(
        long,
        env = "MICROSERVING_TRANSPORT",
        value_name = "NAME",
        default_value = "auto",
        help_heading = "Cluster"
    )]
    pub(crate) transport: TransportName,

    /// Address of this host that the engines which send to this one reach, and a port for their control connections; port 0 takes a free
    /// one. For `nixl`, which `auto` then takes; with `nixl` by default the host of --listen, if that is one address.
    #[arg(long, env = "MICROSERVING_NIXL_LISTEN", value_name = "IP:PORT", help_heading = "Cluster")]
    pub(crate) nixl_listen: Option<SocketAddr>,

    /// NIXL's `libnixl_capi.so`; by default where the system's loader finds it.
    #[arg(long, env = "MICROSERVING_NIXL_LIBRARY", value_name = "PATH", help_heading = "Cluster")]
    pub(crate) nixl_library: Option<PathBuf>,

    /// Number of this engine in its world, from 0: what `recv_rank` says of it. For `nvshmem`.
    #[arg(
        long,
        env = "MICROSERVING_WORLD_RANK",
        value_name = "RANK",
        help_heading = "Cluster",
        requires_all = ["world_size", "world_file"]
    )]
    pub(crate) world_rank: Option<u32>,

    /// Engines in the world. For `nvshmem`.
    #[arg(
        long,
        env = "MICROSERVING_WORLD_SIZE",
        value_name = "N",
        help_heading = "Cluster",
        requires = "world_rank",
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    pub(crate) world_size: Option<u32>,

    /// File that all engines of the world see, on which they agree on its id: engine 0 writes it, the others wait for it. For `nvshmem`.
    #[arg(
        long,
        env = "MICROSERVING_WORLD_FILE",
        value_name = "PATH",
        help_heading = "Cluster",
        requires = "world_rank"
    )]
    pub(crate) world_file: Option<PathBuf>,

    /// Where the device half, which holds weights, pages and transport, runs: `within` this process; `spawn` has it in a process of its
    /// own, which is started anew when it ends; a path with a `/` is a socket at which a worker that others start finds this process
    /// (`engined worker --front PATH`). docs/operating.md.
    #[arg(
        long,
        env = "MICROSERVING_WORKER",
        value_name = "PLACE",
        default_value = "within",
        help_heading = "Cluster",
        value_parser = worker_place
    )]
    pub(crate) worker: WorkerPlace,

    /// Verify everything that arrives by checksums, which the sender is asked for.
    #[arg(long, env = "MICROSERVING_CHECKSUM", help_heading = "Cluster")]
    pub(crate) checksum: bool,

    /// Key that signs addresses, shared by the cluster: 8 characters or more. By default drawn at start.
    #[arg(
        long,
        env = "MICROSERVING_CLUSTER_KEY",
        value_name = "KEY",
        hide_env_values = true,
        help_heading = "Cluster",
        conflicts_with = "cluster_key_file"
    )]
    pub(crate) cluster_key: Option<String>,

    /// File that holds the cluster key; keeps it out of the process list.
    #[arg(long, env = "MICROSERVING_CLUSTER_KEY_FILE", value_name = "PATH", help_heading = "Cluster")]
    pub(crate) cluster_key_file: Option<PathBuf>,

    /// Seconds that a reservation stands without a sign of life from its sender.
    #[arg(long, env = "MICROSERVING_LEASE_SECONDS", value_name = "SECONDS", default_value = "30",
          help_heading = "Cluster", value_parser = positive_seconds)]
    pub(crate) lease_seconds: Duration,

    #[command(flatten)]
    pub(crate) daemon: DaemonOptions,
}

impl Daemon for Options {
    fn daemon(&self) -> &DaemonOptions {
        &self.daemon
    }
}

/// Where the device half runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WorkerPlace {
    /// In this process.
    Within,
    /// In a process that this one starts.
    Spawned,
    /// In a process that others start, which finds this socket.
    At(PathBuf),
}

fn worker_place(text: &str) -> Result<WorkerPlace, String> {
    match text {
        "within" => Ok(WorkerPlace::Within),
        "spawn" => Ok(WorkerPlace::Spawned),
        path if path.contains('/') => Ok(WorkerPlace::At(path.into())),
        _ => Err("give `within`, `spawn`, or a path with a `/` in it".into()),
    }
}

/// The form that weights are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightForm {
    /// The file's own; quantised types without kernels of their own become `q8_0`.
    Auto,
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Eight bits with a scale per block of 32.
    #[value(name = "q8_0")]
    Q8_0,
}

/// The element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvForm {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// A GPU if there is one, else the processor.
    Auto,
    /// The processor.
    Cpu,
    /// The first GPU that CUDA's driver knows.
    Cuda,
}

/// How KV travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportName {
    /// `nvshmem` with the world options, `openshmem` under its launcher, `nixl` where it is told to listen, else `shm` where the system has
    /// it, else `loopback`.
    Auto,
    /// Shared memory between processes of one host.
    Shm,
    /// Reads by NIXL between engines of one host or several that come and go.
    Nixl,
    /// Symmetric host memory of the processes that one launcher started.
    Openshmem,
    /// Symmetric memory of GPUs.
    Nvshmem,
    /// Within this process.
    Loopback,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declaration_is_sound() {
        Options::command().debug_assert();
    }

    #[test]
    fn places_of_workers_are_told_apart() {
        assert_eq!(worker_place("within"), Ok(WorkerPlace::Within));
        assert_eq!(worker_place("spawn"), Ok(WorkerPlace::Spawned));
        assert_eq!(worker_place("./w.sock"), Ok(WorkerPlace::At("./w.sock".into())));
        assert!(worker_place("spwan").is_err());
    }

    #[test]
    fn every_option_has_a_flag_an_environment_name_and_a_meaning() {
        for arg in Options::command().get_arguments() {
            let Some(long) = arg.get_long() else { panic!("{} has no flag", arg.get_id()) };
            let name = format!("MICROSERVING_{}", long.replace('-', "_").to_uppercase());
            assert_eq!(arg.get_env().and_then(|env| env.to_str()), Some(name.as_str()));
            assert!(arg.get_help().is_some(), "{long} has no meaning");
        }
    }
}
