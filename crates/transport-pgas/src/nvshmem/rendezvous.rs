//! How the elements of a world agree on its unique id: by a file that all of them see.

use std::path::Path;
use std::time::Duration;

use nvshmem_sys::{NvshmemHost, UniqueId};

use super::NvshmemConfig;
use crate::clock::now;

/// How often the file is looked for.
const PAUSE: Duration = Duration::from_millis(50);

/// Element 0 makes the id and writes it; the others wait for it.
pub(super) fn agree(library: &NvshmemHost, config: &NvshmemConfig) -> Result<UniqueId, String> {
    if config.pe.0 == 0 {
        let id = UniqueId::new(library).map_err(|error| error.to_string())?;
        publish(&config.id_file, id.as_bytes())?;
        Ok(id)
    } else {
        wait_for(&config.id_file, config.patience).map(UniqueId::from_bytes)
    }
}

/// Writes the id so that nobody sees half of it, or one of an earlier world.
fn publish(path: &Path, id: &[u8]) -> Result<(), String> {
    let beside = path.with_extension("new");
    let written = std::fs::write(&beside, id).and_then(|()| std::fs::rename(&beside, path));
    written.map_err(|error| format!("the world's id cannot be written to {}: {error}", path.display()))
}

/// Waits for an id that was written after the wait began, or not long before: an older file is of an earlier world.
fn wait_for(path: &Path, patience: Duration) -> Result<[u8; UniqueId::NUM_BYTES], String> {
    let begin = now();
    loop {
        let age =
            std::fs::metadata(path).and_then(|file| file.modified()).ok().and_then(|at| at.elapsed().ok());
        let waited = now().saturating_sub(begin);
        if age.is_some_and(|age| age <= waited + patience)
            && let Ok(bytes) = std::fs::read(path)
            && let Ok(id) = bytes.try_into()
        {
            return Ok(id);
        }
        if waited > patience {
            return Err(format!(
                "element 0 has not written the world's id to {} within {patience:?}",
                path.display()
            ));
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_waited_for_and_an_old_one_is_not_taken() {
        let dir = std::env::temp_dir().join(format!("microserving-id-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("world");
        assert!(wait_for(&path, Duration::from_millis(1)).unwrap_err().contains("has not written"));
        publish(&path, &[7; UniqueId::NUM_BYTES]).unwrap();
        assert_eq!(wait_for(&path, Duration::from_secs(5)), Ok([7; UniqueId::NUM_BYTES]));
        std::thread::sleep(Duration::from_millis(50));
        assert!(wait_for(&path, Duration::from_millis(10)).is_err(), "it is older than anybody would wait");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
