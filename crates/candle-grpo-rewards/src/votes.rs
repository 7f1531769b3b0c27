//! Equal answers among completions.

use super::Votes;

/// Returns, for each answer, the index of the first one that equals it, or `None` if there is no
/// answer.
pub(super) fn votes<A>(
    answers: impl IntoIterator<Item = Option<A>>,
    equal: impl Fn(&A, &A) -> bool,
) -> Votes {
    let mut different: Vec<(usize, A)> = Vec::new();
    let vote = |(place, answer): (usize, Option<A>)| {
        let answer = answer?;
        if let Some((first, _)) = different.iter().find(|(_, other)| equal(other, &answer)) {
            return Some(*first);
        }
        different.push((place, answer));
        Some(place)
    };
    answers.into_iter().enumerate().map(vote).collect()
}
