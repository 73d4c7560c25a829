//! `cases`: which tests bear the id of which case.

use std::error::Error;

/// Prints each id with its tests.
///
/// # Errors
///
/// An id without a test.
pub fn run() -> Result<(), Box<dyn Error>> {
    let mut missing = Vec::new();
    for (id, essence, tests) in kda_tests::cases::list()? {
        println!("{id}  {essence}");
        for test in &tests {
            println!("     {test}");
        }
        if tests.is_empty() {
            missing.push(id);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("no test for {}", missing.join(", ")).into())
}
