//! What a step's use of L2 costs the kernel behind it: one that reads 20 MB again and again, with
//! steps between that touch caches, or null slots only.

use std::error::Error;

use kda_runtime::PreparedKda;
use kda_tests::cuda::{self, DeviceMemory};

use super::layers::Layers;
use super::timing::Timer;

/// Microseconds of the neighbour, less those of the steps between.
pub struct Neighbour {
    /// Behind steps that touch caches.
    pub behind_steps: f64,
    /// Behind the same steps over null slots.
    pub behind_null_steps: f64,
    /// Alone.
    pub alone: f64,
}

/// Measures it for one mode.
///
/// # Errors
///
/// The library's or the driver's.
pub fn measure(
    timer: &Timer,
    layers: &Layers,
    prepared: &PreparedKda,
) -> Result<Neighbour, Box<dyn Error>> {
    let bytes = if cuda::is_emulated()? {
        1 << 16
    } else {
        20 << 20
    };
    let memory = DeviceMemory::new(bytes)?;
    timer.bare.fill(timer.stream, &memory)?;
    // Per layer: a step over live slots, over null slots or none, then the neighbour or nothing.
    let time = |live: Option<bool>, read: bool| -> Result<f64, Box<dyn Error>> {
        let times = timer.graph(layers.count(), || {
            (0..layers.count()).try_for_each(|layer| {
                match live {
                    Some(true) => layers.enqueue(timer.stream, prepared, layer)?,
                    Some(false) => layers.enqueue_null(timer.stream, prepared, layer)?,
                    None => {}
                }
                if read {
                    timer.bare.read(timer.stream, &memory, bytes)?;
                }
                Ok(())
            })
        })?;
        Ok(times.median)
    };
    Ok(Neighbour {
        behind_steps: time(Some(true), true)? - time(Some(true), false)?,
        behind_null_steps: time(Some(false), true)? - time(Some(false), false)?,
        alone: time(None, true)?,
    })
}
