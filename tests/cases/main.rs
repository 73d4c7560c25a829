//! Faults that users of decode kernels met, each as a test named after its id in `README.md`, and
//! for each group a property over the whole kind. One file a group.

mod addressing;
mod launch;
mod numerics;
mod padding;
mod support;
mod verify;
