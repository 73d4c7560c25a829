//! Weights from a checkpoint's layout to the step's. Host memory only.

use half::{bf16, f16};
use kda_codegen::{CONV_WIDTH, HEAD_DIM};

use crate::Error;

/// A conv weight as a checkpoint stores it.
#[derive(Clone, Copy, Debug)]
pub enum ConvWeight<'a> {
    /// Taken as it is.
    F32(&'a [f32]),
    /// Widened, which is exact.
    Bf16(&'a [bf16]),
    /// Widened, which is exact.
    F16(&'a [f16]),
}

impl ConvWeight<'_> {
    fn len(&self) -> usize {
        match self {
            ConvWeight::F32(values) => values.len(),
            ConvWeight::Bf16(values) => values.len(),
            ConvWeight::F16(values) => values.len(),
        }
    }

    fn get(&self, index: usize) -> f32 {
        match self {
            ConvWeight::F32(values) => values[index],
            ConvWeight::Bf16(values) => values[index].to_f32(),
            ConvWeight::F16(values) => values[index].to_f32(),
        }
    }
}

/// Re-lays a conv weight from the checkpoint's `[3 dim, 1, 4]` (q, k, v channels) to the step's
/// `[3, 4, dim]`, as [`Weights::conv`](crate::Weights::conv) wants it, in f32.
///
/// A tensor-parallel rank passes the q, k and v channels of its own heads, in this order.
///
/// # Errors
///
/// [`Error::TooShort`] when there are not 3 · 128 · 4 elements for each head.
///
/// ```
/// use kda_runtime::{ConvWeight, decode_conv_weight};
///
/// let checkpoint: Vec<f32> = (0..3 * 128 * 4).map(|i| i as f32).collect();
/// let decode = decode_conv_weight(ConvWeight::F32(&checkpoint), 1)?;
/// // Taps of a channel lie a row apart.
/// assert_eq!((decode[0], decode[128], decode[256], decode[384]), (0.0, 1.0, 2.0, 3.0));
/// # Ok::<(), kda_runtime::Error>(())
/// ```
pub fn decode_conv_weight(checkpoint: ConvWeight<'_>, heads: usize) -> Result<Vec<f32>, Error> {
    let dim = heads * HEAD_DIM;
    let needed = 3 * dim * CONV_WIDTH;
    if checkpoint.len() != needed {
        return Err(Error::TooShort {
            operand: "conv_weight",
            found: checkpoint.len(),
            needed,
        });
    }
    let mut decode = Vec::with_capacity(needed);
    for part in 0..3 {
        for tap in 0..CONV_WIDTH {
            let of = |channel| checkpoint.get((part * dim + channel) * CONV_WIDTH + tap);
            decode.extend((0..dim).map(of));
        }
    }
    Ok(decode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_channel_and_tap_finds_its_place() {
        let (heads, dim) = (2, 256);
        // Below 2⁸: exact in either half.
        let of = |part: usize, channel: usize, tap: usize| (part * 7 + channel + tap * 31) % 256;
        let mut checkpoint = Vec::new();
        for part in 0..3 {
            for channel in 0..dim {
                checkpoint.extend((0..4).map(|tap| of(part, channel, tap) as f32));
            }
        }
        let bf16s: Vec<bf16> = checkpoint.iter().map(|&x| bf16::from_f32(x)).collect();
        let f16s: Vec<f16> = checkpoint.iter().map(|&x| f16::from_f32(x)).collect();
        let decode = decode_conv_weight(ConvWeight::F32(&checkpoint), heads).unwrap();
        for half in [ConvWeight::Bf16(&bf16s), ConvWeight::F16(&f16s)] {
            assert_eq!(decode_conv_weight(half, heads).unwrap(), decode);
        }
        for part in 0..3 {
            for tap in 0..4 {
                for channel in 0..dim {
                    let found = decode[(part * 4 + tap) * dim + channel];
                    assert_eq!(found, of(part, channel, tap) as f32);
                }
            }
        }
        let error = decode_conv_weight(ConvWeight::F16(&f16s), 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "conv_weight holds 3072 elements, 1536 needed"
        );
    }
}
