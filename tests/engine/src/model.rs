//! A model of random weights, and where random numbers come from.

use half::bf16;

pub const HEAD_DIM: usize = 128;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// In 0..1.
    fn uniform(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal: mean 0, variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..4).map(|_| self.uniform() - 0.5).sum::<f32>() * 3f32.sqrt()
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.word() % count as u64) as usize
    }

    pub fn chance(&mut self, part: f32) -> bool {
        self.uniform() < part
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    fn many(&mut self, count: usize, scale: f32, offset: f32) -> Vec<f32> {
        (0..count).map(|_| scale * self.normal() + offset).collect()
    }
}

/// One layer's weights on the host.
pub struct Layer {
    /// `[3, 4, dim]`.
    pub conv: Vec<f32>,
    /// `[dim, 128]`.
    pub f_b: Vec<bf16>,
    /// `[heads]`.
    pub a_log: Vec<f32>,
    /// `[dim]`.
    pub dt_bias: Vec<f32>,
    /// `[128]`.
    pub norm: Vec<f32>,
}

pub struct Model {
    pub layers: Vec<Layer>,
    /// Heads times 128.
    pub dim: usize,
    /// Columns of the projection.
    pub pitch: usize,
}

impl Model {
    pub fn random(layers: usize, heads: usize, random: &mut Random) -> Model {
        let dim = heads * HEAD_DIM;
        let layers = (0..layers)
            .map(|_| Layer {
                conv: random.many(12 * dim, 0.5, 0.1),
                f_b: random
                    .many(dim * HEAD_DIM, 0.1, 0.0)
                    .into_iter()
                    .map(bf16::from_f32)
                    .collect(),
                a_log: random.many(heads, 0.5, 0.0),
                dt_bias: random.many(dim, 0.7, -0.5),
                norm: random.many(HEAD_DIM, 0.2, 1.0),
            })
            .collect();
        Model {
            layers,
            dim,
            pitch: 4 * dim + HEAD_DIM + heads,
        }
    }
}
