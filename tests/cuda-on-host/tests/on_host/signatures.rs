//! `kernels/signatures.rs` has the names, types and order of the arguments of all kernels.

use std::collections::BTreeMap;
use std::path::Path;

type Arguments = Vec<(String, String)>;

/// Parses the arguments up to the closing parenthesis.
fn arguments(text: &str, argument: impl Fn(&str) -> (String, String)) -> Arguments {
    let end = text.find(')').expect("a closing parenthesis");
    text[..end]
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
        .map(argument)
        .collect()
}

/// Parses an argument in CUDA: `const T *x` is `x: In<Self>`.
fn from_cuda(argument: &str) -> (String, String) {
    let words: Vec<&str> = argument.split_whitespace().collect();
    let (name, types) = words.split_last().expect("a type and a name");
    let is_pointer = name.starts_with('*');
    let is_const = types[0] == "const";
    let plain = match types[usize::from(is_const)] {
        "T" => "Self",
        "float" => "f32",
        "double" => "f64",
        "uint8_t" => "u8",
        "uint32_t" => "u32",
        "uint64_t" => "u64",
        "int" => "i32",
        other => panic!("{argument}: {other}"),
    };
    let whole = match (is_pointer, is_const) {
        (true, true) => format!("In<{plain}>"),
        (true, false) => format!("Out<{plain}>"),
        (false, _) => plain.to_owned(),
    };
    (name.trim_start_matches('*').to_owned(), whole)
}

fn from_rust(argument: &str) -> (String, String) {
    let (name, of) = argument.split_once(':').expect("a name and a type");
    (name.trim().to_owned(), of.trim().to_owned())
}

#[test]
fn signatures_match_the_kernels() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let text = read("signatures.rs");
    let mut listed: BTreeMap<String, Arguments> = BTreeMap::new();
    let mut found: BTreeMap<String, Arguments> = BTreeMap::new();
    for (marker, suffix) in [("\nkernels! {", "_##name"), ("\nplain_kernels! {", "")] {
        let start = text.find(marker).unwrap() + marker.len();
        let body = text[start..].split("\n}").next().unwrap();
        for block in body.split('}') {
            let Some((head, signatures)) = block.split_once('{') else {
                continue;
            };
            let file = head.split_whitespace().next().unwrap();
            for signature in signatures.split(';') {
                if let Some((name, rest)) = signature.split_once('(') {
                    let name = name.trim().to_owned() + suffix;
                    listed.insert(name, arguments(rest, from_rust));
                }
            }
            kernels_of(&read(&format!("{file}.cu")), &mut found);
        }
    }
    assert!(!listed.is_empty());
    assert_eq!(listed, found);
}

/// Collects the kernels of a file: `__global__ void __launch_bounds__(..) name(arguments)`, or
/// `name_##name` for a kernel of each dtype. A macro `.._ARGUMENTS(T)` stands for arguments.
fn kernels_of(source: &str, found: &mut BTreeMap<String, Arguments>) {
    let mut source = source.replace("\\\n", " ");
    let macros: Vec<(String, String)> = source
        .lines()
        .filter_map(|line| line.strip_prefix("#define ")?.split_once("_ARGUMENTS(T) "))
        .map(|(name, arguments)| (format!("{name}_ARGUMENTS(T)"), arguments.to_owned()))
        .collect();
    for (name, arguments) in macros {
        source = source.replace(&name, &arguments);
    }
    for part in source.split("__global__ void").skip(1) {
        let part = match part.trim().strip_prefix("__launch_bounds__(") {
            Some(bounds) => bounds.split_once(')').expect("a closing parenthesis").1,
            None => part,
        };
        let (name, rest) = part.split_once('(').expect("arguments");
        // A kernel for each width `D`, and for each number of heads `H`.
        for width in ["64", "128", "256"] {
            for heads in ["2", "4", "8"] {
                let name = name.trim().replace("##D##", width);
                let name = name.replace("##H##", heads);
                found.insert(name, arguments(rest, from_cuda));
            }
        }
    }
}
