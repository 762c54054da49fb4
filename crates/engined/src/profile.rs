//! Where profiles are kept, and which one this engine has.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use microserving_cost::{About, Profile};
use microserving_executor::ExecutorInfo;
use tracing::{info, warn};

use crate::options::Options;

/// Says what this engine is, as its profile must.
pub(crate) fn about(options: &Options, info: &ExecutorInfo) -> About {
    let threads = match options.threads {
        Some(threads) => threads as usize,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    About {
        model: info.model.clone(),
        numeric_mode: info.layout.numeric_mode.clone(),
        machine: format!("{}, {threads} threads", processor()),
    }
}

/// Returns the file that `--profile` names, or this user's for the model, its numeric mode and the machine.
///
/// # Errors
/// If there is neither a name nor a folder for caches.
pub(crate) fn file(options: &Options, info: &ExecutorInfo, about: &About) -> Result<PathBuf> {
    if let Some(file) = &options.profile {
        return Ok(file.clone());
    }
    let from_home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let cache = cache
        .or_else(from_home)
        .context("profile: the user has no folder for caches; name a file by --profile")?;
    let machine: String = about
        .machine
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' })
        .collect();
    let name = format!("{:016x}-{machine}.json", info.layout.fingerprint());
    Ok(cache.join("microserving").join("profiles").join(name))
}

/// Reads the profile of this engine, if there is one. A file that was named must be usable; one in the cache may be of another time.
///
/// # Errors
/// If the file that `--profile` names cannot be read, or is no profile.
pub(crate) fn load(options: &Options, info: &ExecutorInfo) -> Result<Option<Profile>> {
    let about = about(options, info);
    let Ok(file) = file(options, info, &about) else { return Ok(None) };
    let named = options.profile.is_some();
    let read = || -> Result<Profile> {
        let json = std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Profile::from_json(&json).with_context(|| format!("{} cannot be used", file.display()))
    };
    if !named && !file.exists() {
        return Ok(None);
    }
    match read() {
        Ok(profile) => {
            if *profile.about() != about {
                warn!(file = %file.display(), of = ?profile.about(), "the profile is of another engine; corrections must do the rest");
            }
            info!(file = %file.display(), "serving a profile");
            Ok(Some(profile))
        }
        Err(error) if named => Err(error.context("profile")),
        Err(error) => {
            warn!(error = format!("{error:#}"), "the cached profile is not served");
            Ok(None)
        }
    }
}

/// Writes a profile, in whole or not at all.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn save(profile: &Profile, file: &Path) -> Result<()> {
    let context = || format!("cannot write {}", file.display());
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).with_context(context)?;
    }
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let beside = PathBuf::from(name);
    std::fs::write(&beside, profile.to_json()).with_context(context)?;
    std::fs::rename(&beside, file).with_context(context)
}

/// Returns the processor's name as the system tells it, or its kind.
fn processor() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
    let name = name.and_then(|rest| rest.split_once(':')).map(|(_, name)| name.trim().to_owned());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}
