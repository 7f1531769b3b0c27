//! The program that runs assertions in Python.

use anyhow::{Result, bail};
use serde_json::json;

use super::case::Case;
use super::statements::{CHECKS, EXITS};

pub(super) const DRIVER: &str = include_str!("driver.py");

/// Names that a program may expect if its prompt has a function signature: type hints, and modules
/// that such data sets import.
const BEFORE_FUNCTIONS: &str = "\
from typing import *
from collections import *
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re
import string, sys";

/// Returns the driver's input, for a test that is not an input and output pair.
pub(super) fn driver_input(program: &str, case: &Case, marker: &str) -> Result<Vec<u8>> {
    let (before, test) = match case {
        Case::Output { .. } => bail!("a pair of input and output is no test of the driver"),
        Case::Assertions {
            text,
            candidates,
            entry,
        } => {
            let before = if candidates.is_empty() {
                ""
            } else {
                BEFORE_FUNCTIONS
            };
            let test = json!({
                "text": text,
                "candidates": candidates,
                "entry": entry,
                "checks": CHECKS,
                "exits": EXITS,
            });
            (before, test)
        }
        Case::Call {
            function,
            arguments,
            expected,
        } => {
            let test = json!({"function": function, "arguments": arguments, "expected": expected});
            (BEFORE_FUNCTIONS, test)
        }
    };
    let pieces = [before, program, &test.to_string(), marker];
    let pieces = pieces.map(|piece| format!("{:016}{piece}", piece.len()));
    Ok(pieces.concat().into_bytes())
}
