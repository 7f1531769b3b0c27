//! Masks: made from sampled tokens, and the per-sequence values that they accept.

use candle_core::{Result, Tensor};
use candle_grpo_core::advantage::KlPenalty;
use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, AdvantagePipeline, Advantages, Mask};
use candle_grpo_test_support::{devices, message};
use rstest::rstest;

#[rstest]
// The first stop token counts, whichever it is; the tokens behind it do not.
#[case(&[2], [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])]
#[case(&[2, 9], [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])]
#[case(&[9, 2], [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])]
#[case(&[100], [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])]
#[case(&[], [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])]
fn responses_count_up_to_their_first_stop_token(
    #[case] stop_token_ids: &[u32],
    #[case] expected: [[u8; 4]; 3],
) -> Result<()> {
    let responses = [[5u32, 2, 9, 2], [2, 2, 2, 2], [5, 6, 9, 8]];
    for device in devices() {
        let responses = Tensor::new(&responses, device)?;
        let mask = Mask::until_stop(&responses, stop_token_ids)?;
        assert_eq!(mask.selected().to_vec2::<u8>()?, expected);
        let responses = responses.to_dtype(candle_core::DType::I64)?;
        let mask = Mask::until_stop(&responses, stop_token_ids)?;
        assert_eq!(mask.selected().to_vec2::<u8>()?, expected);
    }
    Ok(())
}

#[test]
fn responses_of_another_form_are_named() -> Result<()> {
    for device in devices() {
        let floats = Tensor::new(&[[1f32, 2.]], device)?;
        assert_eq!(
            message(Mask::until_stop(&floats, &[2])),
            "responses: F32 [1, 2], must be integers [B, T]"
        );
        let row = Tensor::new(&[1u32, 2], device)?;
        assert_eq!(
            message(Mask::until_stop(&row, &[2])),
            "responses: U32 [2], must be integers [B, T]"
        );
    }
    Ok(())
}

#[test]
fn values_for_another_number_of_sequences_are_named_as_the_caller_gave_them() -> Result<()> {
    for device in devices() {
        let response_mask = Tensor::new(&[[1u8, 1], [1, 0]], device)?;
        let mask = Mask::new(&response_mask)?;
        let three = Tensor::new(&[1f32, 0., 1.], device)?;
        let batch = AdvantageBatch::new(&three, 3)
            .response_mask(&response_mask)
            .old_log_probs(&response_mask)
            .ref_log_probs(&response_mask);
        let two_stages = AdvantagePipeline::reinforce_plus_plus_baseline();
        let penalty = KlPenalty::default();
        for (name, message) in [
            ("keep", message(mask.keep_samples(&three))),
            ("per_sequence", message(mask.spread(&three))),
            ("per_sequence", message(mask.place_on_last(&three))),
            (
                "advantages",
                message(Advantages::new(three.clone()).on_tokens(&mask)),
            ),
            ("rewards", message(two_stages.estimate(&batch))),
            (
                "rewards",
                message(penalty.penalize_sequence_rewards(&three, &batch)),
            ),
        ] {
            let expected = "shape [3], must be [2], one for each row of response_mask";
            assert_eq!(message, format!("{name}: {expected}"));
        }
        let rows = message(mask.select_sequences(&three));
        assert!(
            rows.starts_with("x: shape [3], must be [2] or [2, ..]"),
            "{rows}"
        );
    }
    Ok(())
}
