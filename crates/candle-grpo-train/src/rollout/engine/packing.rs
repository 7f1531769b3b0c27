//! The division of weights into messages, as vLLM divides them.

use std::ops::Range;

/// Divides weights with these sizes into messages: a message ends after the weight with which it
/// exceeds `limit` bytes. So it may be larger by almost one weight, and a weight is never divided.
/// The sender and the receiver must divide alike.
pub(super) fn messages(sizes: &[usize], limit: usize) -> Vec<Range<usize>> {
    let mut messages = Vec::new();
    let (mut start, mut bytes) = (0, 0usize);
    for (index, size) in sizes.iter().enumerate() {
        bytes = bytes.saturating_add(*size);
        if bytes > limit {
            messages.push(start..index + 1);
            (start, bytes) = (index + 1, 0);
        }
    }
    if start < sizes.len() {
        messages.push(start..sizes.len());
    }
    messages
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::messages;
    use proptest::prelude::*;

    #[test]
    fn a_message_ends_after_the_weight_that_exceeds_the_limit() {
        // As large as the limit: the next weight goes along.
        assert_eq!(messages(&[8, 1, 3], 8), [0..2, 2..3]);
        assert_eq!(messages(&[4, 4], 8), [0..2]);
        assert_eq!(messages(&[4, 4, 1], 8), [0..3]);
        // Larger.
        assert_eq!(messages(&[9, 1], 8), [0..1, 1..2]);
        assert_eq!(messages(&[1, 100, 1], 8), [0..2, 2..3]);
        assert_eq!(messages(&[9, 9], 8), [0..1, 1..2]);
        // One.
        assert_eq!(messages(&[1], 8), [0..1]);
        assert_eq!(messages(&[8], 8), [0..1]);
        assert_eq!(messages(&[9], 8), [0..1]);
        assert_eq!(messages(&[1, 1], 0), [0..1, 1..2]);
        assert_eq!(messages(&[0, 0, 1], 0), [0..3]);
        assert!(messages(&[], 8).is_empty());
        assert_eq!(messages(&[usize::MAX, 1], usize::MAX), [0..2]);
    }

    proptest! {
        #[test]
        fn messages_are_all_weights_in_order(
            sizes in prop::collection::vec(0usize..40, 0..30),
            limit in 0usize..60,
        ) {
            let messages = messages(&sizes, limit);
            let mut next = 0;
            for (number, message) in messages.iter().enumerate() {
                prop_assert_eq!(message.start, next);
                prop_assert!(message.end > message.start);
                next = message.end;
                let bytes = |end: usize| sizes[message.start..end].iter().sum::<usize>();
                prop_assert!(bytes(message.end - 1) <= limit);
                prop_assert!(bytes(message.end) > limit || number + 1 == messages.len());
            }
            prop_assert_eq!(next, sizes.len());
        }
    }
}
