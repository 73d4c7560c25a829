//! The tables of `docs/` that follow from the code are generated: what `Policies::for_device` chooses, and
//! what a launch passes. `KDA_BLESS=1` renews them.

use std::fmt::Write;

use kda_codegen::Arch;
use kda_codegen::operands::markdown_table;
use kda_runtime::{Config, Policies, StepKind, Target};
use kda_tests::pages;

/// Models, their gate and heads.
const MODELS: [(&str, &str, usize); 3] = [
    ("Kimi K3", "lower bound", 96),
    ("GLM-5.3-Flash", "lower bound", 64),
    ("Kimi-Linear-48B", "softplus", 32),
];

/// `mode ≤ requests`, fewest requests first.
fn policies(target: Target<'_>, heads: usize, kind: StepKind) -> String {
    let policies = Policies::for_device(target, &Config::kimi_k3(heads), &[kind]);
    let last = policies.0.len() - 1;
    let parts = policies.0.iter().enumerate().map(|(i, policy)| {
        if i == last {
            format!("{}", policy.mode)
        } else {
            format!("{} ≤ {}", policy.mode, policy.max_requests)
        }
    });
    parts.collect::<Vec<_>>().join(" · ")
}

fn table() -> String {
    let mut text = String::from(
        "| model | gate | ranks | heads a rank | decode | verify 4 | verify 8 |\n\
         | --- | --- | --: | --: | --- | --- | --- |\n",
    );
    for (model, gate, heads) in MODELS {
        let mut ranks = 1;
        while heads % ranks == 0 && ranks <= 32 {
            let share = heads / ranks;
            let h200 = Target::named(Arch::Sm90a, "NVIDIA H200");
            let of = |kind| policies(h200, share, kind);
            let _ = writeln!(
                text,
                "| {model} | {gate} | {ranks} | {share} | {} | {} | {} |",
                of(StepKind::Decode),
                of(StepKind::Verify(4)),
                of(StepKind::Verify(8)),
            );
            ranks *= 2;
        }
    }
    text
}

#[test]
fn the_table_of_models_is_the_generated_one() {
    pages::holds("models.md", &table());
}

#[test]
fn the_table_of_operands_is_the_generated_one() {
    pages::holds("operands.md", &markdown_table());
}
