//! The table of docs/programs.md that counts the lines of each program.

use std::path::{Path, PathBuf};

const BEGIN: &str = "<!-- lines: begin -->\n";
const END: &str = "<!-- lines: end -->";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns a file's lines of code: none that is blank, a comment, an attribute, an import or closes brackets only, and nothing of its tests.
fn code(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut lines = Vec::new();
    let mut importing = false;
    for line in text.lines().take_while(|line| *line != "#[cfg(test)]") {
        let bare = line.trim();
        importing |= ["use ", "pub use ", "pub(crate) use "].iter().any(|start| line.starts_with(start));
        let counts = !importing
            && !bare.is_empty()
            && !bare.starts_with("//")
            && !bare.starts_with("#[")
            && !bare.starts_with("mod ")
            && !bare.chars().all(|letter| "{}()[];,".contains(letter));
        importing &= !bare.ends_with(';');
        if counts {
            lines.push(line.to_owned());
        }
    }
    lines
}

/// Returns how many of a program's lines are its `serve`.
fn serving(lines: &[String]) -> usize {
    let Some(start) = lines.iter().position(|line| line.starts_with("    async fn serve(")) else { return 0 };
    // What closes a function is not among the lines; what follows it is as little indented as it is.
    let rest = lines[start + 1..]
        .iter()
        .take_while(|line| line.starts_with("        ") || line.starts_with("    )"));
    rest.count() + 1
}

fn table() -> String {
    let folder = root().join("crates/router/src/programs");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .expect("the programs")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.retain(|path| {
        path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("mod.rs")
    });
    files.sort();
    let mut table = "| program | `serve` | with all that is its own |\n| --- | --- | --- |\n".to_owned();
    for path in files {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let lines = code(&path);
        let inner = std::fs::read_dir(folder.join(&name)).into_iter().flatten();
        let parts =
            inner.map(|entry| entry.expect("an entry").path()).filter(|path| !path.ends_with("tests.rs"));
        let whole = lines.len() + parts.map(|path| code(&path).len()).sum::<usize>();
        let serve = serving(&lines);
        assert!(serve > 1, "{name} has no serve");
        table += &format!("| `{name}` | {serve} | {whole} |\n");
    }
    table
}

/// `UPDATE_EXPECT=1` writes the table.
#[test]
fn the_table_of_lines_is_true() {
    let path = root().join("docs/programs.md");
    let text = std::fs::read_to_string(&path).expect("the document");
    let (before, rest) = text.split_once(BEGIN).expect("the table begins");
    let (written, after) = rest.split_once(END).expect("the table ends");
    let table = table();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{table}{END}{after}")).expect("can be written");
        return;
    }
    assert_eq!(written, table, "docs/programs.md is not current: run this test with UPDATE_EXPECT=1");
}
