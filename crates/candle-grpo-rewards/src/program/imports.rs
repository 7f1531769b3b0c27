//! The local modules that a Python script imports.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns `files`, and the local modules that those ending in `.py` import, directly or
/// indirectly.
///
/// Modules are searched in the first script's directory and in `folder`. A relative import is
/// searched in the importing file's directory. The search reads `import` statements without running
/// them.
pub(super) fn with_imports(files: Vec<PathBuf>, folder: &Path) -> Vec<PathBuf> {
    let is_python = |path: &&PathBuf| path.extension().is_some_and(|end| end == "py");
    let script = files.iter().find(is_python).cloned();
    let beside = script.as_deref().and_then(Path::parent);
    let mut roots = vec![folder.to_path_buf()];
    roots.extend(beside.filter(|root| *root != folder).map(Path::to_path_buf));
    let mut found: BTreeSet<PathBuf> = files.iter().cloned().collect();
    let mut open: Vec<PathBuf> = files.iter().filter(is_python).cloned().collect();
    while let Some(file) = open.pop() {
        let text = fs::read(&file).unwrap_or_default();
        for module in imports(&String::from_utf8_lossy(&text)) {
            let name = module.trim_start_matches('.');
            let bases = match module.len() - name.len() {
                0 => roots.clone(),
                dots => file
                    .ancestors()
                    .nth(dots)
                    .map(PathBuf::from)
                    .into_iter()
                    .collect(),
            };
            for path in bases.iter().flat_map(|base| module_files(base, name)) {
                if found.insert(path.clone()) {
                    open.push(path);
                }
            }
        }
    }
    found.into_iter().collect()
}

/// Returns the files for module `name` below `root`: its own, and its enclosing packages'.
pub(super) fn module_files(root: &Path, name: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut path = root.to_path_buf();
    files.push(path.join("__init__.py"));
    for part in name.split('.').filter(|part| !part.is_empty()) {
        path.push(part);
        files.push(path.with_file_name(format!("{part}.py")));
        files.push(path.join("__init__.py"));
    }
    files.retain(|file| file.is_file());
    files
}

/// Returns the modules that `text` imports. A name after `from x import` may also be a module.
fn imports(text: &str) -> Vec<String> {
    let mut modules = Vec::new();
    let mut lines = text.lines().flat_map(|line| line.split(';'));
    while let Some(line) = lines.next() {
        let mut statement = without_comment(line).trim().to_owned();
        let words: Vec<&str> = statement.split_whitespace().collect();
        let names = |names: &str| -> Vec<String> {
            let names = names
                .split(',')
                .filter_map(|name| name.split_whitespace().next());
            names.map(str::to_owned).collect()
        };
        match words.first() {
            Some(&"import") => modules.extend(names(&statement["import".len()..])),
            Some(&"from") => {
                // A list of names may continue over several lines.
                while (statement.contains('(') && !statement.contains(')'))
                    || statement.ends_with('\\')
                {
                    let Some(next) = lines.next() else { break };
                    statement = format!(
                        "{} {}",
                        statement.trim_end_matches('\\'),
                        without_comment(next).trim()
                    );
                }
                let Some((module, imported)) = statement["from".len()..].split_once(" import")
                else {
                    continue;
                };
                let module = module.trim();
                let dot = if module.ends_with('.') { "" } else { "." };
                let imported = names(imported.trim_matches([' ', '(', ')', '\t']));
                modules.extend(imported.iter().map(|name| format!("{module}{dot}{name}")));
                modules.push(module.to_owned());
            }
            _ => {}
        }
    }
    modules
}

fn without_comment(line: &str) -> &str {
    line.split('#').next().unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imports_are_found_in_all_their_forms() {
        let text = "
import json, a.b as c  # import no
if True: pass; import d
    from e import f as g
from .h import (i,
    j,  # a comment
)
from . import k
from l import \\
    m
x = 'from here'
";
        let expected = [
            "json", "a.b", "d", "e.f", "e", ".h.i", ".h.j", ".h", ".k", ".", "l.m", "l",
        ];
        assert_eq!(imports(text), expected);
    }

    #[test]
    fn local_modules_are_found_and_libraries_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "run/reward.py",
            "import json, sys\nimport rules\nfrom parts import score\n",
        );
        write("run/rules.py", "import reward\n");
        write("run/parts/__init__.py", "");
        write(
            "run/parts/score.py",
            "from .deep.words import count\nfrom . import other\n",
        );
        write("run/parts/other.py", "");
        write("run/parts/deep/words.py", "import none\n");
        write("run/not_imported.py", "");
        let script = folder.path().join("run/reward.py");
        let found = with_imports(vec![script], folder.path());
        let found: Vec<&str> = found
            .iter()
            .map(|path| path.strip_prefix(folder.path()).unwrap().to_str().unwrap())
            .collect();
        let expected = [
            "run/parts/__init__.py",
            "run/parts/deep/words.py",
            "run/parts/other.py",
            "run/parts/score.py",
            "run/reward.py",
            "run/rules.py",
        ];
        assert_eq!(found, expected);
    }
}
