//! Test forms in data sets.

use rstest::rstest;
use serde_json::{Value, json};

use super::{fenced, isolated, scores};

const SQUARE: &str = "def f(x):\n    return x * x";
const CUBE: &str = "def f(x):\n    return x * x * x";

/// A right program passes, and a wrong one does not. Each form may also be given as JSON text.
fn tells_apart(right: &str, wrong: &str, row: &Value) {
    let Some(reward) = isolated(json!({})) else {
        return;
    };
    let mut as_text = row.clone();
    as_text["tests"] = json!(row["tests"].to_string());
    let completions: Vec<(String, Value)> = [row, &as_text]
        .into_iter()
        .flat_map(|row| [right, wrong].map(|program| (fenced(program), row.clone())))
        .collect();
    let scores = scores(&reward, &completions).unwrap();
    assert_eq!(scores, [1., 0., 1., 0.], "{row}");
}

const READS: &str = "print(int(input()) ** 2)";

#[rstest]
#[case::pairs(json!([{"input": "3", "output": "9"}, {"input": "-2", "output": "4"}]))]
#[case::columns(json!({"inputs": ["3\n", "-2\n"], "outputs": ["9\n", "4\n"]}))]
#[case::lines(json!({"inputs": [["3"], ["-2"]], "outputs": [["9"], ["4"]]}))]
fn inputs_and_outputs(#[case] tests: Value) {
    tells_apart(READS, "print(7)", &json!({"tests": tests}));
}

#[rstest]
#[case::lists(json!({"fn_name": "f", "inputs": [[3], [-2]], "outputs": [9, 4]}))]
#[case::wrapped(json!({"fn_name": "f", "inputs": [[3], [-2]], "outputs": [[9], [4]]}))]
#[case::lines(json!({"fn_name": "f", "inputs": ["3", "-2\n"], "outputs": ["9", "4"]}))]
#[case::each(json!([{"fn_name": "f", "input": "3", "output": "9", "type": "function_call"}]))]
fn calls_of_a_function(#[case] tests: Value) {
    tells_apart(SQUARE, CUBE, &json!({"tests": tests}));
    let method = "class Solution:\n    def f(self, x: int) -> Optional[int]:\n        return x * x";
    tells_apart(method, CUBE, &json!({"tests": tests}));
    // An object that equals everything is no result.
    let equal =
        "class A:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()";
    tells_apart(SQUARE, equal, &json!({"tests": tests}));
}

#[test]
fn arguments_and_results_are_values_of_json() {
    for (program, arguments, result, passes) in [
        (
            "lambda a, b: (a, (b,))",
            json!([1, "x"]),
            json!([1, ["x"]]),
            1.,
        ),
        (
            "lambda a, b: (a, (b,))",
            json!("1\n\"x\""),
            json!("[1, [\"x\"]]"),
            1.,
        ),
        (
            "lambda d: {1: d[2]}",
            json!([{"2": 5}]),
            json!({"1": 5}),
            1.,
        ),
        ("lambda: None", json!([]), json!(null), 1.),
        ("lambda: 2.0", json!([]), json!(2), 1.),
        ("lambda: 'a'", json!(""), json!("\"a\""), 1.),
        ("lambda: 'a b'", json!(""), json!("a b"), 1.),
        ("lambda: '5'", json!([]), json!("5"), 1.),
        ("lambda: 5", json!([]), json!("5"), 0.),
        ("lambda: [5, 6]", json!([]), json!([5]), 0.),
        ("lambda: 5", json!([]), json!([5, 6]), 0.),
        ("lambda: {1}", json!([]), json!([1]), 0.),
        ("lambda a: a", json!([1, 2]), json!(1), 0.),
        // In a row, integers outside 64 bits are texts.
        (
            "lambda: 2**100",
            json!([]),
            json!("1267650600228229401496703205376"),
            1.,
        ),
        (
            "lambda: '1267650600228229401496703205376'",
            json!([]),
            json!("1267650600228229401496703205376"),
            1.,
        ),
        (
            "lambda: (1, -2**64)",
            json!([]),
            json!([1, "-18446744073709551616"]),
            1.,
        ),
        (
            "lambda: 2**100 + 1",
            json!([]),
            json!("1267650600228229401496703205376"),
            0.,
        ),
        ("lambda: 2**63", json!([]), json!("9223372036854775808"), 0.),
        ("12", json!([]), json!(12), 0.),
    ] {
        let Some(reward) = isolated(json!({})) else {
            return;
        };
        let tests = json!([{"fn_name": "f", "input": arguments, "output": result}]);
        let score = super::score(&reward, &format!("f = {program}"), tests);
        assert_eq!(score, passes, "{program} {arguments} {result}");
    }
}

#[rstest]
#[case::texts(json!(["assert f(3) == 9", "assert f(-2) == 4"]))]
#[case::raise(json!("if f(3) != 9:\n    raise ValueError('wrong')"))]
#[case::function("def run():\n    assert f(3) == 9\nrun()".into())]
#[case::guard("def run():\n    assert f(3) == 9\nif __name__ == '__main__':\n    run()".into())]
#[case::unittest("
import unittest
class Squares(unittest.TestCase):
    def setUp(self):
        self.x = 3
    def test_f(self):
        self.assertEqual(f(self.x), 9)
        with self.assertRaises(TypeError):
            f('a')
if __name__ == '__main__':
    unittest.main()
".into())]
#[case::unittest_without_guard("
from unittest import TestCase, main
class Squares(TestCase):
    def test_f(self):
        self.assertTrue(f(3) == 9)
main()
".into())]
#[case::pytest("
from solution import f
def test_one():
    assert f(1) == 1
def test_three():
    assert f(3) == 9
".into())]
#[case::pytest_class("
class TestF:
    def setup_method(self):
        self.x = 3
    def test_f(self):
        assert f(self.x) == 9
".into())]
#[case::exception("
try:
    f('a')
    assert False, 'no error'
except TypeError:
    pass
assert f(3) == 9
".into())]
#[case::only_an_exception(json!([
    "try:\n    f('a')\n    assert False\nexcept TypeError:\n    pass",
    "try:\n    f('a')\nexcept TypeError:\n    pass\nelse:\n    assert False\nassert f(3) == 9",
]))]
#[case::caught("
try:
    assert f(3) == 9
except AssertionError:
    print('failed')
".into())]
#[case::caught_with_others("
def test_f():
    try:
        assert f(3) == 9
    except (ValueError, AssertionError) as error:
        print(error)
".into())]
#[case::all_caught(json!([
    "try:\n    assert f(3) == 9\nexcept Exception as error:\n    print(error)",
    "try:\n    assert f(3) == 9\nexcept:\n    pass",
]))]
#[case::caught_and_raised("
try:
    assert f(3) == 9
except AssertionError as error:
    raise SystemExit(1)
".into())]
#[case::helper_named_test("
def test(x, expected):
    assert f(x) == expected
def main():
    test(3, 9)
main()
".into())]
#[case::main_module("from __main__ import f\nassert f(3) == 9".into())]
#[case::exit("import sys\nf(3) == 9 or sys.exit(1)".into())]
#[case::function_in_a_list("def run():\n    assert f(3) == 9\nfor step in [run]:\n    step()".into())]
#[case::starmap("
from itertools import starmap
def check(x, expected):
    assert f(x) == expected
list(starmap(check, [(3, 9)]))
".into())]
#[case::map_of_unittest("
from unittest import TestCase
class Squares(TestCase):
    def test_f(self):
        list(map(lambda x: self.assertEqual(f(x), x * x), [3]))
".into())]
#[case::method_of_setup("
class TestF:
    def setup_method(self, method):
        self.x = 3 if method.__name__ == 'test_f' else 1
    def test_f(self):
        assert f(self.x) == 9
".into())]
fn statements(#[case] tests: Value) {
    tells_apart(SQUARE, CUBE, &json!({"tests": tests}));
    // A guarded part in the program does not run, because it would read input.
    let guarded = format!("{SQUARE}\nif __name__ == '__main__':\n    print(f(int(input())))");
    tells_apart(&guarded, CUBE, &json!({"tests": tests}));
}

#[test]
fn a_function_of_a_candidate_gets_the_entry_point() {
    let tests = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(3) == 9\n";
    let row = json!({"tests": tests, "entry_point": "f"});
    tells_apart(SQUARE, CUBE, &row);
    // No other function is taken.
    tells_apart(&format!("{SQUARE}\ndef g(x):\n    return 0"), CUBE, &row);
    let method = "class Solution:\n    def f(self, x: List[int]):\n        return x * x";
    tells_apart(method, CUBE, &row);
    let named = json!({"tests": tests, "entry_point": "Solution().f"});
    tells_apart(method, SQUARE, &named);
    // Without a name, one of the program's functions must pass, wherever it is.
    let row = json!({"tests": tests});
    for other in ["\ndef g(x):\n    return 0", ""] {
        tells_apart(&format!("{SQUARE}{other}"), &format!("{CUBE}{other}"), &row);
        tells_apart(
            &format!("{other}\n{SQUARE}"),
            &format!("{other}\n{CUBE}"),
            &row,
        );
    }
    tells_apart(method, "x = 9", &row);
    tells_apart(&format!("import math\n{SQUARE}"), "import math", &row);
}

#[test]
fn a_test_that_executes_no_assertion_does_not_pass() {
    let Some(reward) = isolated(json!({})) else {
        return;
    };
    for tests in [
        "for x in f(3):\n    assert x == 9",
        "if f(3):\n    assert f(3) == 9",
        "def test_f():\n    for x in f(3):\n        assert x",
        "import unittest\nclass A(unittest.TestCase):\n    @unittest.skip('no')\n    def test_f(self):\n        self.assertEqual(f(3), 9)",
        "def run():\n    assert f(3) == 9\nif f(3):\n    run()",
        "assert f(3) ==",
        "assert (f(3) == 9, 'wrong')",
        "def test_f():\n    assert (f(3) == 9, 'wrong')\n    assert True",
        "import no_such_module\nassert f(3) == ()",
        "def test_f(capsys):\n    assert f(3) == ()",
        "class TestF:\n    def test_f(self, capsys):\n        assert f(3) == ()",
        "try:\n    for x in f(3):\n        assert x\nfinally:\n    pass\nfor x in f(3):\n    assert x",
    ] {
        let empty = "def f(x):\n    return ()";
        assert_eq!(super::score(&reward, empty, json!(tests)), 0., "{tests}");
    }
}
