//! Compiles one kernel per mode and prints what ptxas reports.
//!
//! `cargo run --example resources -- sm_90a 12 1 [mode…]`

use kda_codegen::{KernelSpec, Nvrtc};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let arch = arguments.next().as_deref().unwrap_or("sm_90a").parse()?;
    let heads = arguments.next().as_deref().unwrap_or("12").parse()?;
    let tokens: usize = arguments.next().as_deref().unwrap_or("1").parse()?;
    let mut spec = KernelSpec::new(arch, heads);
    if tokens > 1 {
        spec = spec.with_verify(tokens);
    }
    let nvrtc = Nvrtc::load(&[])?;
    let mut modes = arguments
        .map(|text| text.parse())
        .collect::<Result<Vec<_>, _>>()?;
    if modes.is_empty() {
        modes = spec.legal_modes();
    }
    for mode in modes {
        let kernel = nvrtc.compile(&spec.with_mode(mode))?;
        println!("{mode:40} {:?}", kernel.resources);
    }
    Ok(())
}
