//! Masks that are made from sampled tokens.

use candle_core::{Result, Tensor};
use candle_grpo_core::Mask;
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
