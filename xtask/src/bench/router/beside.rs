//! What a user would pick instead, and floors: measured in the same run, in turns, on the same core.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use microserving_harness::{Daemon, http};

use crate::shell;

/// Routers that are installed from PyPI, each in its own environment, with the policies that are measured.
const PEERS: [(&str, &str); 3] = [("vllm-router", "0.1.17"), ("sglang-router", "0.3.2"), ("smg", "1.13.0")];
const POLICIES: [&str; 2] = ["round_robin", "cache_aware"];
/// A peer imports a good deal of Python before it listens.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts the bare proxy, nginx, and every peer under each of its policies. What is not there is skipped aloud.
pub(super) fn start(binaries: &Path, stubs: &[Daemon], peers: bool) -> Result<Vec<Daemon>> {
    let mut args = Vec::new();
    for stub in stubs {
        args.extend(["--engine".to_owned(), stub.url().to_owned()]);
    }
    let proxy = binaries.join("examples/bare_proxy");
    let mut beside = vec![Daemon::spawn("bare_proxy", &proxy, &args, Duration::from_secs(20))?];
    let mut more: Vec<Result<Daemon>> = nginx(stubs).into_iter().collect();
    if peers {
        more.extend(self::peers(stubs));
    }
    for started in more {
        match started {
            Ok(daemon) => beside.push(daemon),
            Err(error) => println!("SKIPPED: {error:#}"),
        }
    }
    Ok(beside)
}

fn nginx(stubs: &[Daemon]) -> Option<Result<Daemon>> {
    let Some(program) =
        ["/usr/sbin/nginx", "/usr/bin/nginx"].into_iter().find(|path| Path::new(path).exists())
    else {
        println!("SKIPPED: nginx is not there (Debian's package nginx-light has it)");
        return None;
    };
    Some(start_nginx(program, stubs))
}

fn start_nginx(program: &str, stubs: &[Daemon]) -> Result<Daemon> {
    let (port, dir) = (free_port()?, shell::target_dir().join("nginx"));
    std::fs::create_dir_all(&dir)?;
    let servers: String =
        stubs.iter().map(|stub| format!("server {};", stub.url().trim_start_matches("http://"))).collect();
    let config = dir.join("nginx.conf");
    let text = format!(
        "daemon off; master_process off; worker_processes 1; pid {dir}/pid; error_log {dir}/error.log;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; client_body_buffer_size 64k; client_body_temp_path {dir}; proxy_temp_path {dir};\n\
         fastcgi_temp_path {dir}; uwsgi_temp_path {dir}; scgi_temp_path {dir}; keepalive_requests 100000000;\n\
         upstream engines {{ {servers} keepalive 128; keepalive_requests 100000000; }}\n\
         server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engines; proxy_http_version 1.1;\n\
         proxy_set_header Connection \"\"; proxy_buffering off; }} }} }}\n",
        dir = dir.display()
    );
    std::fs::write(&config, text)?;
    let mut command = Command::new(program);
    command.arg("-e").arg(dir.join("error.log")).arg("-c").arg(&config);
    Daemon::adopt("nginx", command, port, is_up, Duration::from_secs(10))
}

fn peers(stubs: &[Daemon]) -> Vec<Result<Daemon>> {
    let mut peers = Vec::new();
    for (package, version) in PEERS {
        match install(package, version) {
            Ok(program) => {
                peers.extend(POLICIES.iter().map(|policy| start_peer(package, &program, policy, stubs)));
            }
            Err(error) => peers.push(Err(error)),
        }
    }
    peers
}

/// Installs a peer into an environment of its own, once.
fn install(package: &str, version: &str) -> Result<PathBuf> {
    let dir = shell::target_dir().join("peers").join(package);
    let program = dir.join("bin").join(package);
    let stamp = dir.join(format!("{version}.installed"));
    if !stamp.exists() {
        shell::run(Command::new("python3").args(["-m", "venv"]).arg(&dir))?;
        let pip = dir.join("bin/pip");
        let wanted = format!("{package}=={version}");
        shell::run(Command::new(pip).args(["install", "--quiet", "--no-input", &wanted]))
            .with_context(|| format!("{wanted} cannot be installed"))?;
        std::fs::write(&stamp, "")?;
    }
    Ok(program)
}

fn start_peer(package: &str, program: &Path, policy: &str, stubs: &[Daemon]) -> Result<Daemon> {
    let (port, metrics) = (free_port()?.to_string(), free_port()?.to_string());
    let mut command = Command::new(program);
    if package != "vllm-router" {
        command.arg("launch");
    }
    command.args(["--host", "127.0.0.1", "--port", &port, "--policy", policy]);
    command.args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics]);
    command.arg("--log-level").arg(if package == "vllm-router" { "warning" } else { "warn" });
    command.arg("--worker-urls").args(stubs.iter().map(Daemon::url));
    let port = port.parse().context("a port")?;
    Daemon::adopt(&format!("{package} {policy}"), command, port, is_up, PATIENCE)
}

/// A router is up when a request comes back.
fn is_up(url: &str) -> bool {
    let body = br#"{"model":"stub","prompt":"up","max_tokens":1}"#;
    http::post_bytes(&format!("{url}/v1/completions"), &[], body).is_ok_and(|answer| answer.status == 200)
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
