//! The multiplication between layers: time of the pair less time of the multiplication alone. It
//! stands for a projection's time and traffic: one row, whatever the batch, by a weight of its own a
//! layer, as fast as the weight streams.

use std::error::Error;

use kda_runtime::PreparedKda;
use kda_tests::cuda::{self, DeviceMemory};

use super::bare::{DEPTH, Edge, GemvOperands, filled};
use super::layers::Layers;
use super::timing::{Timer, Times};

/// Columns a multiprocessor computes: 38 MB of weight on 132, at least 8.4 µs of an H200's memory.
const COLUMNS: usize = 20;

/// The multiplications of every layer.
pub struct Gemm {
    edge: Edge,
    columns: usize,
    weights: DeviceMemory,
    input: DeviceMemory,
    output: DeviceMemory,
}

impl Gemm {
    /// Allocates the weights of `layers` layers and fills them.
    ///
    /// # Errors
    ///
    /// The driver's, or a product that is wrong.
    pub fn new(timer: &Timer, layers: &Layers, edge: Edge) -> Result<Gemm, Box<dyn Error>> {
        let columns = match cuda::is_emulated()? {
            true => 8,
            false => COLUMNS * timer.multiprocessors()?,
        };
        let gemm = Gemm {
            edge,
            columns,
            weights: DeviceMemory::new(layers.count() * columns * DEPTH * 2)?,
            input: DeviceMemory::new(DEPTH * 2)?,
            output: DeviceMemory::new(columns * 4)?,
        };
        timer.bare.fill(timer.stream, &gemm.weights)?;
        timer.bare.fill(timer.stream, &gemm.input)?;
        gemm.check(timer, layers)?;
        Ok(gemm)
    }

    /// What is multiplied, in words.
    pub fn describe(&self) -> String {
        let megabytes = (self.columns * DEPTH * 2) as f64 / 1e6;
        let launch = match self.edge {
            Edge::Plain => "plain",
            Edge::Programmatic => "programmatic",
        };
        format!(
            "bf16 [1, {DEPTH}] x [{DEPTH}, {}] ({megabytes:.1} MB) ahead of each layer, {launch} launch",
            self.columns
        )
    }

    fn enqueue(&self, timer: &Timer, layers: &Layers, layer: usize) -> Result<(), Box<dyn Error>> {
        let operands = GemvOperands {
            weights: &self.weights,
            offset: layer * self.columns * DEPTH * 2,
            columns: self.columns,
            input: &self.input,
            output: &self.output,
        };
        layers.enqueue_gemv(timer.stream, &timer.bare, &operands, self.edge)
    }

    /// Times the multiplications alone.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn alone(&self, timer: &Timer, layers: &Layers) -> Result<Times, Box<dyn Error>> {
        timer.graph(layers.count(), || {
            (0..layers.count()).try_for_each(|layer| self.enqueue(timer, layers, layer))
        })
    }

    /// Times a multiplication and a step for each layer.
    ///
    /// # Errors
    ///
    /// The library's or the driver's.
    pub fn pairs(
        &self,
        timer: &Timer,
        layers: &Layers,
        prepared: &PreparedKda,
    ) -> Result<Times, Box<dyn Error>> {
        timer.graph(layers.count(), || {
            (0..layers.count()).try_for_each(|layer| {
                self.enqueue(timer, layers, layer)?;
                layers.enqueue(timer.stream, prepared, layer)
            })
        })
    }

    /// Compares the last layer's first and last product with their values in f64.
    fn check(&self, timer: &Timer, layers: &Layers) -> Result<(), Box<dyn Error>> {
        let layer = layers.count() - 1;
        self.enqueue(timer, layers, layer)?;
        timer.wait()?;
        let mut bytes = vec![0; self.columns * 4];
        self.output.download(0, &mut bytes)?;
        for column in [0, self.columns - 1] {
            let start = (layer * self.columns + column) * DEPTH / 2;
            let (mut product, mut size) = (0.0, 0.0);
            for word in 0..DEPTH / 2 {
                for (a, b) in filled(start + word).into_iter().zip(filled(word)) {
                    product += a * b;
                    size += (a * b).abs();
                }
            }
            let at = 4 * column;
            let found = f32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
            // A chain of 224 sums in f32 and a tree of five more.
            if (f64::from(found) - product).abs() > 230.0 * f64::from(f32::EPSILON) * size {
                return Err(format!("gemv column {column}: {found}, expected {product}").into());
            }
        }
        Ok(())
    }
}
