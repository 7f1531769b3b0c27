//! Verdicts on 200 programs.

use candle_grpo_test_support::is_long;
use serde_json::{Value, json};

use super::problems::{PROBLEMS, Problem};
use super::{NEVER, fenced, isolated, scores};

/// Attempts to pass without a right function. Each uses the function name that all problems have.
const HOSTILE: [&str; 15] = [
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "def f(*a):\n    import os\n    os._exit(0)",
    "def f(*a):\n    raise SystemExit(0)",
    "print('passed'); print('ok'); print(True)\nimport os\nos._exit(0)",
    "import sys\nprint(open(sys.argv[0]).read())\nraise SystemExit",
    "def f(*a):\n    return f(*a)",
    "def f(*a):\n    import os\n    os.kill(os.getpid(), 9)",
    "import ctypes\nctypes.string_at(0)",
    "f = [0] * 10**10",
    "import os\nos.closerange(0, 1000)",
    "import os\nos.execv('/bin/true', ['true'])",
    "import atexit, os\natexit.register(os._exit, 0)\nraise KeyboardInterrupt",
    "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\ndef f(*a):\n    return None, 3",
    "import os\nif os.fork():\n    os._exit(0)\nos.abort()",
];

/// Returns the program, with each case's input and output.
fn as_pairs(program: &str, problem: &Problem) -> (String, Value) {
    let program = format!("{program}\nprint(repr(f(*eval('[' + input() + ']'))))");
    let pairs = problem.cases.iter();
    let pairs = pairs.map(|(arguments, result)| json!({"input": arguments, "output": result}));
    (
        fenced(&program),
        json!({"tests": pairs.collect::<Vec<_>>()}),
    )
}

fn as_assertions(program: &str, problem: &Problem) -> (String, Value) {
    let cases = problem.cases.iter();
    let lines = cases.map(|(arguments, result)| format!("assert f({arguments}) == {result}\n"));
    (fenced(program), json!({"tests": lines.collect::<String>()}))
}

#[test]
fn two_hundred_programs_have_the_verdicts_that_they_deserve() {
    let limits = json!({"time_seconds": NEVER, "cpu_seconds": 20, "memory_mib": 256});
    let Some(reward) = isolated(json!({"limits": limits})) else {
        return;
    };
    let mut completions = Vec::new();
    let mut expected = Vec::new();
    for (i, problem) in PROBLEMS.iter().enumerate() {
        let right = problem.right.iter().map(|program| (*program, 1.));
        let wrong = problem.wrong.iter().map(|program| (*program, 0.));
        let hostile = HOSTILE.iter().cycle().skip(3 * i).take(3);
        let hostile = hostile.map(|program| (*program, 0.));
        for (n, (program, score)) in right.chain(wrong).chain(hostile).enumerate() {
            completions.push(match (i + n) % 2 {
                0 => as_assertions(program, problem),
                _ => as_pairs(program, problem),
            });
            expected.push(score);
        }
    }
    assert_eq!(expected.len(), 200);
    // Each problem has ten programs, so that every seventh program is of each kind in turn.
    let every = if is_long() { 1 } else { 7 };
    let completions: Vec<_> = completions.into_iter().step_by(every).collect();
    let expected: Vec<f32> = expected.into_iter().step_by(every).collect();
    let scores = scores(&reward, &completions).unwrap();
    let differ = completions.iter().zip(&scores).zip(&expected);
    let differ = differ.filter(|((_, score), expected)| *score != *expected);
    let differ: Vec<_> = differ.collect();
    assert!(differ.is_empty(), "{} verdicts: {differ:#?}", differ.len());
}

#[test]
fn the_share_counts_the_tests_that_pass() {
    let tests = json!([
        "assert f(1) == 1",
        "assert f(2) == 4",
        {"input": "", "output": "done"},
        "assert f(3) == 9",
    ]);
    // The second test ends its own process only.
    let program = "def f(n):\n    if n == 2:\n        import os\n        os._exit(0)\n    return n * n\nprint('done')";
    for (share, expected) in [(true, 0.75), (false, 0.)] {
        let Some(reward) = isolated(json!({"share": share})) else {
            return;
        };
        assert_eq!(super::score(&reward, program, tests.clone()), expected);
        let right = "f = lambda n: n * n\nprint('done')";
        assert_eq!(super::score(&reward, right, tests.clone()), 1.);
    }
}

#[test]
fn scores_do_not_depend_on_the_number_of_workers() {
    let tests = json!({"tests": [{"input": "3", "output": "9"}, {"input": "2", "output": "4"}]});
    let programs = [
        "print(int(input()) ** 2)",
        "print(9)",
        "1 / 0",
        "print(input() * 2)",
    ];
    let programs = programs.iter().cycle().take(6);
    let completions: Vec<_> = programs.map(|text| (fenced(text), tests.clone())).collect();
    let expected = [1., 0.5, 0., 0., 1., 0.5];
    for workers in [1, 3, 16] {
        let Some(reward) = isolated(json!({"workers": workers, "share": true})) else {
            return;
        };
        assert_eq!(
            scores(&reward, &completions).unwrap(),
            expected,
            "{workers} workers"
        );
    }
}

#[test]
fn a_completion_without_a_block_scores_zero() {
    let Some(reward) = isolated(json!({"languages": ["python"]})) else {
        return;
    };
    let row = json!({"tests": "assert f() == 1"});
    for (completion, expected) in [
        ("def f(): return 1", 0.),
        ("```sh\ndef f(): return 1\n```", 0.),
        (
            "```python\ndef f(): return 2\n```\n```python\ndef f(): return 1\n```",
            1.,
        ),
        (
            "```python\ndef f(): return 1\n```\n```python\ndef f(): return 2\n```",
            0.,
        ),
        (
            "```python\ndef f(): return 1\n```\n```text\noutput\n```",
            1.,
        ),
        ("```python\ndef f(): return 1\n", 1.),
    ] {
        let scores = scores(&reward, &[(completion.to_owned(), row.clone())]).unwrap();
        assert_eq!(scores, [expected], "{completion}");
    }
}
