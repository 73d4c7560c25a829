//! Owns the records of steps that keep one state: what the delta rule did in a token, and how it is
//! repeated. Must not know pools.
//!
//! A record is f32 `[3, 128]`: decay by key, normalised k by key, u by value. Repeating it,
//! `S ← S · decay` and then `S ← u k + S` in one rounding, is what a kernel did to make the state, so
//! a kernel's records give its states bit for bit.

use half::bf16;

use crate::{HEAD_DIM, StateType};

/// f32 elements of a record.
pub const RECORD_SIZE: usize = 3 * HEAD_DIM;

/// Repeats one record on a `[128 values, 128 keys]` state.
///
/// # Panics
///
/// If either has another length.
pub fn repeat(state: &mut [f32], record: &[f32], state_type: StateType) {
    assert_eq!(
        (state.len(), record.len()),
        (HEAD_DIM * HEAD_DIM, RECORD_SIZE)
    );
    let (decay, rest) = record.split_at(HEAD_DIM);
    let (k, u) = rest.split_at(HEAD_DIM);
    for (line, &u) in state.chunks_exact_mut(HEAD_DIM).zip(u) {
        for ((s, &decay), &k) in line.iter_mut().zip(decay).zip(k) {
            *s = u.mul_add(k, *s * decay);
            if state_type == StateType::Bf16 {
                *s = bf16::from_f32(*s).to_f32();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{RECORD_SIZE, repeat};
    use crate::{HEAD_DIM, StateType};

    #[test]
    fn a_record_decays_by_key_and_adds_u_by_value() {
        let mut state = vec![2.0; HEAD_DIM * HEAD_DIM];
        let mut record = vec![0.0; RECORD_SIZE];
        record[..HEAD_DIM].fill(1.0);
        (record[3], record[HEAD_DIM + 5], record[2 * HEAD_DIM + 7]) = (0.5, 3.0, 0.25);
        repeat(&mut state, &record, StateType::F32);
        assert_eq!(state[3], 1.0);
        assert_eq!(state[7 * HEAD_DIM + 5], 2.75);
        assert_eq!(state[5 * HEAD_DIM + 7], 2.0);
        record[2 * HEAD_DIM + 7] = 2f32.powi(-12);
        repeat(&mut state, &record, StateType::Bf16);
        assert_eq!(state[7 * HEAD_DIM + 5], 2.75, "rounded to bf16");
    }
}
