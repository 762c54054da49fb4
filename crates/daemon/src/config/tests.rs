use std::path::Path;
use std::process::Command as Process;

use clap::ValueEnum;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Colour {
    Red,
    Green,
}

/// A daemon for tests.
#[derive(Debug, Parser, PartialEq)]
#[command(name = "testd")]
struct Options {
    /// Tokens in a page.
    #[arg(long, env = "MICROSERVING_TEST_PAGE_SIZE", default_value_t = 16)]
    page_size: u32,
    /// Where to find the model.
    #[arg(long)]
    model: String,
    /// Seconds of a lease.
    #[arg(long, default_value = "30", value_parser = crate::positive_seconds)]
    lease_seconds: Duration,
    /// Memory for pages.
    #[arg(long)]
    kv_bytes: Option<ByteSize>,
    /// Engines to use.
    #[arg(long)]
    engine: Vec<String>,
    /// Verify pages.
    #[arg(long)]
    checksum: bool,
    /// A colour.
    #[arg(long, default_value = "red")]
    colour: Colour,
    /// A key.
    #[arg(long, hide_env_values = true)]
    cluster_key: Option<String>,
}

fn args(list: &[&str]) -> Vec<OsString> {
    ["testd"].iter().chain(list).map(OsString::from).collect()
}

fn run(list: &[&str]) -> Options {
    match load::<Options>(args(list)).expect("good options") {
        Loaded::Run(options) => options,
        Loaded::Print(text) => panic!("printed {text}"),
    }
}

fn printed(list: &[&str]) -> String {
    match load::<Options>(args(list)).expect("good options") {
        Loaded::Print(text) => text,
        Loaded::Run(options) => panic!("ran with {options:?}"),
    }
}

fn file(folder: &Path, text: &str) -> String {
    let path = folder.join("testd.toml");
    std::fs::write(&path, text).expect("a temporary folder is writable");
    path.to_str().expect("the path is UTF-8").to_owned()
}

#[test]
fn layers_override_each_other_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let config = file(
        folder.path(),
        "page_size = 32\nmodel = \"toy\"\nlease_seconds = 2\nkv_bytes = \"1GiB\"\nengine = [\"a\", \"b\"]\nchecksum = true\ncolour = \"green\"\n",
    );
    let options = run(&["--config", &config, "--lease-seconds", "5"]);
    assert_eq!(options.page_size, 32);
    assert_eq!(options.model, "toy", "a required option may stand in the file alone");
    assert_eq!(options.lease_seconds, Duration::from_secs(5), "the command line beats the file");
    assert_eq!(options.kv_bytes, Some(ByteSize::new(1 << 30)));
    assert_eq!(options.engine, ["a", "b"]);
    assert!(options.checksum);
    assert_eq!(options.colour, Colour::Green);
    assert_eq!(run(&["--config", &config, "--engine", "c"]).engine, ["c"]);
    assert_eq!(run(&["--model", "m"]).page_size, 16, "without a file the defaults stand");
}

#[test]
fn wrong_files_name_file_and_key() {
    let folder = tempfile::tempdir().unwrap();
    for (text, key, reason) in [
        ("page_sise = 3", "page_sise", "unknown"),
        ("page_size = \"3\"", "page_size", "expected an integer, found string"),
        ("page_size = -3", "page_size", "-3"),
        ("page_size = [3]", "page_size", "not a list"),
        ("page_size = 99999999999", "page_size", "99999999999"),
        ("lease_seconds = 0", "lease_seconds", "more than 0"),
        ("lease_seconds = nan", "lease_seconds", "seconds"),
        ("kv_bytes = \"3 elephants\"", "kv_bytes", "elephants"),
        ("engine = [1]", "engine", "expected a string, found integer"),
        ("checksum = 1", "checksum", "expected a boolean"),
        ("colour = \"blue\"", "colour", "possible values"),
        ("config = \"other.toml\"", "config", "unknown"),
        ("[page_size]\nx = 1", "page_size", "found table"),
    ] {
        let config = file(folder.path(), text);
        let error = load::<Options>(args(&["--model", "m", "--config", &config])).unwrap_err().to_string();
        assert!(error.contains("testd.toml"), "{text}: {error}");
        assert!(error.contains(&format!("`{key}`")), "{text}: {error}");
        assert!(error.contains(reason), "{text}: {error}");
    }
    let config = file(folder.path(), "page_size = = 3");
    let error = load::<Options>(args(&["--config", &config])).unwrap_err();
    assert!(matches!(error, ConfigError::Syntax { .. }));
    let error = load::<Options>(args(&["--config", "/nowhere/testd.toml"])).unwrap_err();
    assert!(matches!(error, ConfigError::Read { .. }), "{error:?}");
}

#[test]
fn wrong_flags_are_refused() {
    for list in [&["--model", "m", "--page-size", "x"][..], &["--pages", "3"], &[], &["--model"]] {
        let error = load::<Options>(args(list)).unwrap_err();
        assert!(matches!(error, ConfigError::CommandLine(_)), "{list:?}: {error:?}");
    }
    assert!(printed(&["--help"]).contains("--page-size"));
}

#[test]
fn the_printed_configuration_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--model", "a \"quoted\" name", "--lease-seconds", "1.5", "--engine", "x", "--engine", "y"];
    let shown = printed(&[&flags[..], &["--kv-bytes", "3MiB", "--checksum", "--print-config"]].concat());
    assert!(shown.contains("page_size = 16  # default"), "{shown}");
    assert!(shown.contains("# Tokens in a page"), "{shown}");
    assert!(shown.contains("checksum = true  # command line"), "{shown}");
    assert!(shown.contains("# cluster_key = (not set)"), "{shown}");
    let config = file(folder.path(), &shown);
    let original = run(&[&flags[..], &["--kv-bytes", "3MiB", "--checksum"]].concat());
    assert_eq!(run(&["--config", &config]), original);
    let again = printed(&["--config", &config, "--print-config"]);
    let strip = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split("  # ").next().unwrap_or_default().to_owned()).collect()
    };
    assert_eq!(strip(&again), strip(&shown));
    assert!(again.contains("page_size = 16  # file"), "{again}");
}

#[test]
fn secrets_are_not_printed() {
    let shown = printed(&["--model", "m", "--cluster-key", "hush", "--print-config"]);
    assert!(!shown.contains("hush"), "{shown}");
    assert!(shown.contains("cluster_key = (set, not shown)"), "{shown}");
}

/// Runs in a process of its own, started by the test below: a test may not change its own process's environment.
#[test]
fn environment_child() {
    if std::env::var_os("MICROSERVING_TEST_CHILD").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let config = file(folder.path(), "page_size = 32\nmodel = \"toy\"\n");
    assert_eq!(run(&["--config", &config]).page_size, 64, "the environment beats the file");
    assert_eq!(run(&["--config", &config, "--page-size", "8"]).page_size, 8);
    let shown = printed(&["--config", &config, "--print-config"]);
    assert!(shown.contains("page_size = 64  # environment MICROSERVING_TEST_PAGE_SIZE"), "{shown}");
}

#[test]
fn the_environment_lies_between_file_and_flags() {
    let child = Process::new(std::env::current_exe().unwrap())
        .args(["--exact", "config::tests::environment_child", "--nocapture"])
        .env("MICROSERVING_TEST_CHILD", "1")
        .env("MICROSERVING_TEST_PAGE_SIZE", "64")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{text}{}", String::from_utf8_lossy(&child.stderr));
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
fn the_reference_lists_every_option() {
    let table = printed(&["--print-options"]);
    for word in [
        "--page-size",
        "`MICROSERVING_TEST_PAGE_SIZE`",
        "`page_size`",
        "`16`",
        "Tokens in a page",
        "--config",
    ] {
        assert!(table.contains(word), "{word}: {table}");
    }
    assert!(!table.contains("print-options"));
}
