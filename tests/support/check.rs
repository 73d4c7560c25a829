//! Owns the judgement of one launch against the f64 oracle and the contract. Must not know who ran
//! the launch, nor the f32 reference.

use half::bf16;
use kda_reference::oracle::{Exact, Oracle};
use kda_reference::records::RECORD_SIZE;
use kda_reference::{CONV_WIDTH, HEAD_DIM, Inputs, NullRule, Plan, Shape, StateType};

use crate::buffers::{Buffers, Region};
use crate::case::Case;
use crate::data::MATRIX;
use crate::errors::{
    Errors, OUT_SLACK, OUT_TERMS_SLACK, OUT_ULPS, STATE_FLUSH, STATE_STEP, bf16_ulp,
};
use crate::executor::Faults;
use crate::locate::locate;
use crate::mismatch::{Mismatch, Requirement};

impl Case {
    /// Judges a launch that found `before` and left `after`.
    ///
    /// Byte for byte: every operand that is only read, the convolution cache, and whatever lies
    /// outside the named slots, rows and columns. Rows of requests that are not live are +0. The
    /// values of live requests lie within the contract's bounds of the oracle, which starts from
    /// `before`.
    ///
    /// # Errors
    ///
    /// The first requirement that does not hold.
    pub fn check(
        &self,
        before: &Buffers,
        after: &Buffers,
        faults: Option<&Faults>,
    ) -> Result<Errors, Mismatch> {
        self.check_inner(before, after, faults)
            .map_err(|mismatch| mismatch.within(self))
    }

    fn check_inner(
        &self,
        before: &Buffers,
        after: &Buffers,
        faults: Option<&Faults>,
    ) -> Result<Errors, Mismatch> {
        let mut errors = Errors::default();
        let written = ["conv_cache", "state_pool", "records", "out"];
        for ((name, old), (_, new)) in before.regions().into_iter().zip(after.regions()) {
            errors.bytes += new.bytes.len() as u64;
            if !written.contains(&name) {
                self.same(name, Requirement::Untouched, &old.bytes, &new.bytes)?;
            }
        }
        self.check_faults(faults)?;
        let plans: Vec<Plan> = (0..self.shape.requests).map(|r| self.plan(r)).collect();
        self.check_untouched(&plans, before, after)?;
        self.check_null_rows(&plans, after)?;
        self.check_lines(&plans, before, after)?;
        for (request, exact) in self.exact(before)? {
            let Plan::Live {
                first, checkpoints, ..
            } = &plans[request]
            else {
                continue;
            };
            for (token, slot, states) in self.kept_states(*first, checkpoints, after) {
                self.check_state(request, token, slot, &exact, &states, &mut errors)?;
            }
            for token in 0..checkpoints.len() {
                self.check_row(request, token, &exact, after, &mut errors)?;
            }
        }
        Ok(errors)
    }

    /// The states `[heads, 128, 128]` that a live request left: token, slot, values. With records,
    /// after every token, by repeating them on the state they belong to.
    pub(crate) fn kept_states(
        &self,
        first: usize,
        checkpoints: &[Option<usize>],
        after: &Buffers,
    ) -> Vec<(usize, usize, Vec<f32>)> {
        let shape = &self.shape;
        if shape.records.is_some() {
            let states = after.repeated(shape, first, checkpoints.len() - 1);
            let states = states.into_iter().enumerate();
            return states
                .map(|(token, states)| (token, first, states))
                .collect();
        }
        let kept = checkpoints.iter().enumerate();
        kept.filter_map(|(token, slot)| {
            let slot = (*slot)?;
            Some((token, slot, after.states(shape, slot)))
        })
        .collect()
    }

    fn check_faults(&self, found: Option<&Faults>) -> Result<(), Mismatch> {
        let expected = Faults::expected(self);
        if found == expected.as_ref() {
            return Ok(());
        }
        let count = |faults: Option<&Faults>| faults.map_or(0.0, |f| f.count.into());
        Err(Mismatch::new("faults", Requirement::Faults)
            .values(count(expected.as_ref()), count(found), 0.0)
            .at(format!("expected {expected:?}, found {found:?}")))
    }

    /// Everything outside what live requests write keeps its bytes.
    fn check_untouched(
        &self,
        plans: &[Plan],
        before: &Buffers,
        after: &Buffers,
    ) -> Result<(), Mismatch> {
        let shape = &self.shape;
        let mut cache = before.conv_cache.clone();
        let mut state = before.state.clone();
        let mut out = before.out.clone();
        let mut records = before.records.clone();
        let copy = |to: &mut Region, from: &Region, start: usize, len: usize| {
            let range = to.offset + start..to.offset + start + len;
            to.bytes[range.clone()].copy_from_slice(&from.bytes[range]);
        };
        for plan in plans {
            let Plan::Live {
                first, checkpoints, ..
            } = plan
            else {
                continue;
            };
            for channel in 0..3 * shape.dim() {
                for position in 0..checkpoints.len() + 2 {
                    let index = shape.conv_index(*first, channel, position);
                    cache.set_bf16(index, after.conv_cache.bf16(index));
                }
            }
            let element = self.state_bytes();
            for slot in checkpoints.iter().flatten() {
                let start = shape.state_index(*slot, 0) * element;
                let len = shape.heads * MATRIX * element;
                copy(&mut state, &after.state, start, len);
            }
            if let (Some(shape_of), Some(records), Some(after)) =
                (&shape.records, &mut records, &after.records)
            {
                let start = shape.record_index(shape_of, *first, 0, 0) * 4;
                let len = (checkpoints.len() - 1) * shape.heads * RECORD_SIZE * 4;
                copy(records, after, start, len);
            }
        }
        let owned = |row: &usize| row % shape.tokens < self.tokens_of(row / shape.tokens);
        for row in (0..shape.rows()).filter(owned) {
            let start = row * shape.out_stride * 2;
            copy(&mut out, &after.out, start, shape.dim() * 2);
        }
        let kept = Requirement::Untouched;
        self.same("conv_cache", kept, &cache.bytes, &after.conv_cache.bytes)?;
        self.same("state_pool", kept, &state.bytes, &after.state.bytes)?;
        if let (Some(records), Some(after)) = (&records, &after.records) {
            self.same("records", kept, &records.bytes, &after.bytes)?;
        }
        self.same("out", kept, &out.bytes, &after.out.bytes)
    }

    fn check_null_rows(&self, plans: &[Plan], after: &Buffers) -> Result<(), Mismatch> {
        let shape = &self.shape;
        for (request, plan) in plans.iter().enumerate() {
            if matches!(plan, Plan::Live { .. }) {
                continue;
            }
            for token in 0..self.tokens_of(request) {
                let row = request * shape.tokens + token;
                for column in 0..shape.dim() {
                    let found = after.out.bf16(row * shape.out_stride + column);
                    if found.to_bits() != 0 {
                        return Err(Mismatch::new("out", Requirement::NullRow)
                            .values(0.0, found.to_f64(), 0.0)
                            .at(format!("row {row} column {column}"))
                            .request(request)
                            .token(token));
                    }
                }
            }
        }
        Ok(())
    }

    /// Live lines: the window's last two taps, then the tokens' raw inputs, exactly.
    fn check_lines(
        &self,
        plans: &[Plan],
        before: &Buffers,
        after: &Buffers,
    ) -> Result<(), Mismatch> {
        let shape = &self.shape;
        for (request, plan) in plans.iter().enumerate() {
            let Plan::Live {
                first,
                offset,
                checkpoints,
                ..
            } = plan
            else {
                continue;
            };
            for channel in 0..3 * shape.dim() {
                for position in 0..checkpoints.len() + 2 {
                    let expected = match position.checked_sub(2) {
                        None => before.conv_cache.bf16(shape.conv_index(
                            *first,
                            channel,
                            offset + 1 + position,
                        )),
                        Some(token) => {
                            let row = request * shape.tokens + token;
                            before.projected.bf16(row * shape.pitch + channel)
                        }
                    };
                    let index = shape.conv_index(*first, channel, position);
                    let found = after.conv_cache.bf16(index);
                    if found.to_bits() != expected.to_bits() {
                        return Err(Mismatch::new("conv_cache", Requirement::Exact)
                            .values(expected.to_f64(), found.to_f64(), 0.0)
                            .at(format!(
                                "slot {first} channel {channel} position {position}"
                            ))
                            .request(request));
                    }
                }
            }
        }
        Ok(())
    }

    fn check_state(
        &self,
        request: usize,
        token: usize,
        slot: usize,
        exact: &Exact,
        states: &[f32],
        errors: &mut Errors,
    ) -> Result<(), Mismatch> {
        let shape = &self.shape;
        for (head, found) in states.chunks_exact(MATRIX).enumerate() {
            let (mut difference, mut size) = (0.0, 0.0);
            for (&expected, &found) in exact.state(shape, token, head).iter().zip(found) {
                let found = f64::from(found);
                difference += (found - expected) * (found - expected);
                size += expected * expected;
            }
            let (difference, size): (f64, f64) = (f64::sqrt(difference), f64::sqrt(size));
            let steps = (token + 1) as f64;
            let mut bound = STATE_STEP * steps * size + STATE_FLUSH;
            // A bf16 state differs by whole steps of 2⁻⁸ where an f32 error reaches over a tie. The
            // oracle knows which elements are that close, and adds their steps up.
            if self.regime.ill_conditioned() || shape.state_type == StateType::Bf16 {
                bound += exact.state_error[token * shape.heads + head];
            }
            let broken = if difference.is_nan() {
                Some(Requirement::NotNan)
            } else {
                (difference > bound).then_some(Requirement::Accurate)
            };
            if let Some(requirement) = broken {
                return Err(Mismatch::new("state_pool", requirement)
                    .values(size, difference, bound)
                    .at(format!(
                        "slot {slot}, Frobenius norm against that of the difference"
                    ))
                    .request(request)
                    .token(token)
                    .head(head));
            }
            errors.matrices += 1;
            errors.state_of_bound = errors.state_of_bound.max(difference / bound);
            if !self.regime.ill_conditioned() && size > 0.0 {
                let relative = (difference - STATE_FLUSH).max(0.0) / size;
                match shape.state_type {
                    StateType::F32 => {
                        errors.state_relative = errors.state_relative.max(relative / steps);
                    }
                    StateType::Bf16 => {
                        errors.state_bf16_relative = errors.state_bf16_relative.max(relative);
                    }
                }
            }
        }
        Ok(())
    }

    fn check_row(
        &self,
        request: usize,
        token: usize,
        exact: &Exact,
        after: &Buffers,
        errors: &mut Errors,
    ) -> Result<(), Mismatch> {
        let (shape, dim) = (&self.shape, self.shape.dim());
        let row = request * shape.tokens + token;
        let wanted = &exact.out[token * dim..][..dim];
        let lost = &exact.out_error[token * dim..][..dim];
        let largest = wanted.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let terms = &exact.out_terms[token * dim..][..dim];
        for (column, (&expected, &lost)) in wanted.iter().zip(lost).enumerate() {
            let head = column / HEAD_DIM;
            let terms = &terms[head * HEAD_DIM..][..HEAD_DIM];
            let terms = terms.iter().fold(0.0f64, |m, &x| m.max(x));
            let slack = (OUT_SLACK * largest).max(OUT_TERMS_SLACK * terms);
            let found = after.out.bf16(row * shape.out_stride + column).to_f64();
            let difference = (found - expected).abs();
            let ulp = bf16_ulp(expected);
            let mut bound = OUT_ULPS * ulp + slack;
            // After the first token of a bf16 state the query meets rounded elements that may have
            // gone the other way.
            let rounded = shape.state_type == StateType::Bf16 && token > 0;
            if self.regime.ill_conditioned() || rounded {
                bound += lost;
            }
            let broken = if difference.is_nan() {
                Some(Requirement::NotNan)
            } else {
                (difference > bound).then_some(Requirement::Accurate)
            };
            if let Some(requirement) = broken {
                return Err(Mismatch::new("out", requirement)
                    .values(expected, found, bound)
                    .at(format!("row {row} column {column}"))
                    .request(request)
                    .token(token)
                    .head(head));
            }
            errors.out_of_bound = errors.out_of_bound.max(difference / bound);
            if !self.regime.ill_conditioned() && !rounded {
                errors.out_ulps = errors.out_ulps.max((difference - slack).max(0.0) / ulp);
            }
        }
        errors.rows += 1;
        Ok(())
    }

    /// Compares bytes of one operand and names the first that differs.
    pub(crate) fn same(
        &self,
        operand: &'static str,
        requirement: Requirement,
        expected: &[u8],
        found: &[u8],
    ) -> Result<(), Mismatch> {
        if expected == found {
            return Ok(());
        }
        let at = expected
            .iter()
            .zip(found)
            .position(|(a, b)| a != b)
            .unwrap_or_else(|| expected.len().min(found.len()));
        let byte = |bytes: &[u8]| bytes.get(at).copied().map_or(f64::NAN, f64::from);
        Err(Mismatch::new(operand, requirement)
            .values(byte(expected), byte(found), 0.0)
            .at(locate(self, operand, at)))
    }
}

impl Case {
    /// What each live request must give, from the operands of `before`.
    ///
    /// The oracle gets dense copies, so that the addresses used here are not its own: request `i` of
    /// the copy starts from slot `i` and keeps nothing.
    ///
    /// # Errors
    ///
    /// What the oracle finds wrong with the shape.
    pub fn exact(&self, before: &Buffers) -> Result<Vec<(usize, Exact)>, Mismatch> {
        let shape = &self.shape;
        let (dim, taps) = (shape.dim(), CONV_WIDTH - 1);
        let mut live = Vec::new();
        let (mut projected, mut cache, mut state) = (Vec::new(), Vec::new(), Vec::new());
        let mut counts = Vec::new();
        let mut gates = Vec::new();
        let mut dense = Shape {
            columns: shape.tokens,
            conv_len: taps + shape.tokens - 1,
            null_rule: NullRule::Negative,
            state_type: shape.state_type,
            eps: shape.eps,
            scale: shape.scale,
            ..Shape::dense(shape.heads, 0, shape.tokens, shape.gate)
        };
        for request in 0..shape.requests {
            let Plan::Live {
                first,
                source,
                offset,
                checkpoints,
            } = self.plan(request)
            else {
                continue;
            };
            for row in request * shape.tokens..(request + 1) * shape.tokens {
                let columns = 0..shape.used_columns();
                projected.extend(columns.map(|c| before.projected.bf16(row * shape.pitch + c)));
                if let Some(region) = &before.gate_input {
                    gates.extend((0..dim).map(|c| region.bf16(row * shape.gate_stride + c)));
                }
            }
            for window in before
                .line(shape, first, offset, offset + taps)
                .chunks_exact(taps)
            {
                cache.extend_from_slice(window);
                cache.resize(cache.len() + shape.tokens - 1, bf16::NAN);
            }
            let states = before.repeated(shape, source, offset).pop();
            state.extend(states.expect("at least one"));
            counts.push(checkpoints.len() as i32);
            live.push(request);
        }
        if live.is_empty() {
            return Ok(Vec::new());
        }
        dense.requests = live.len();
        dense.pool_slots = live.len();
        dense.conv_slot_stride = 3 * dim * dense.conv_len;
        let mut slots = vec![-1; live.len() * dense.columns];
        for i in 0..live.len() {
            slots[i * dense.columns] = i as i32;
        }
        let conv_weight = before.conv_weight.to_f32();
        let f_b = before.f_b.as_ref().map_or(Vec::new(), |r| r.to_bf16());
        let conv_bias = before.conv_bias.as_ref().map(|r| r.to_f32());
        let (a_log, dt_bias) = (before.a_log.to_f32(), before.dt_bias.to_f32());
        let norm = before.norm.to_f32();
        let inputs = Inputs {
            projected: &projected,
            conv_weight: &conv_weight,
            conv_bias: conv_bias.as_deref(),
            f_b: &f_b,
            gate_input: before.gate_input.as_ref().map(|_| &gates[..]),
            a_log: &a_log,
            dt_bias: &dt_bias,
            norm: &norm,
            slots: &slots,
            accepted: None,
            token_counts: self.token_counts.as_ref().map(|_| &counts[..]),
        };
        let oracle = Oracle::new(&dense, &inputs, &cache, &state)
            .map_err(|e| Mismatch::new("oracle", Requirement::Runs).at(e.to_string()))?;
        let exact = |(i, request)| oracle.request(i).map(|exact| (request, exact));
        Ok(live.into_iter().enumerate().filter_map(exact).collect())
    }
}
