//! Whatever the text, a launch ends with a report or an error, never with a panic; and a module can
//! be shared between threads.

mod support;

use kda_emulator::{Launch, Memory, Module, Options, Param};
use support::{IN, OUT};

const SAMPLE: &str = include_str!("ptx/sm_90a.ptx");

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound.max(1)
    }
}

/// Drops, repeats or exchanges lines, or gives one another's last operand.
fn mutate(random: &mut Random) -> String {
    let mut lines: Vec<String> = SAMPLE.lines().map(str::to_string).collect();
    let body = lines.iter().position(|l| l == "{").expect("a body") + 1;
    for _ in 0..=random.below(2) {
        let (a, b) = (
            body + random.below(lines.len() - body),
            body + random.below(lines.len() - body),
        );
        match random.below(4) {
            0 => {
                lines.remove(a);
            }
            1 => {
                let copy = lines[a].clone();
                lines.insert(b, copy);
            }
            2 => lines.swap(a, b),
            _ => {
                let (Some((head, _)), Some((_, tail))) =
                    (lines[a].rsplit_once(", "), lines[b].rsplit_once(", "))
                else {
                    continue;
                };
                lines[a] = format!("{head}, {tail}");
            }
        }
    }
    lines.join("\n")
}

fn run(module: &Module, seed: u64) -> Result<(), kda_emulator::Error> {
    let mut memory = Memory::new();
    memory.add("in", IN, vec![0; 1024]);
    memory.add_uninitialised("out", OUT, 1024);
    memory.add("counter", 0x30_0000, vec![0; 4]);
    let mut arguments: Vec<u8> = [IN, OUT, 0x30_0000]
        .iter()
        .flat_map(|a| a.to_le_bytes())
        .collect();
    arguments.extend([9, 0, 0, 0, 1, 0, 0, 0]);
    let launch = Launch {
        entry: "sample",
        grid: [4, 1, 1],
        block: [64, 1, 1],
        cluster: [2, 1, 1],
        dynamic_shared_bytes: 256,
        params: &[Param::Bytes(arguments), Param::I32(3)],
    };
    let options = Options::default()
        .seed(seed)
        .max_instructions_per_thread(5_000);
    module.launch(&mut memory, &launch, &options).map(|_| ())
}

#[test]
fn no_text_panics() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let (mut parsed, mut failed) = (0, 0);
    let rounds = std::env::var("KDA_EMULATOR_ROUNDS")
        .ok()
        .and_then(|r| r.parse().ok())
        .unwrap_or(300);
    for round in 0..rounds {
        let text = mutate(&mut random);
        let Ok(module) = Module::parse(&text) else {
            continue;
        };
        parsed += 1;
        if let Err(error) = run(&module, round) {
            failed += 1;
            assert!(!error.to_string().is_empty());
        }
    }
    assert!(
        parsed > rounds / 4 && failed > rounds / 10,
        "{parsed} parse and {failed} fail of {rounds}"
    );
}

#[test]
fn one_module_serves_many_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    let module = Module::parse(SAMPLE).expect("the sample parses");
    shared(&module);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let module = &module;
            scope.spawn(move || run(module, seed).expect("the sample is sound"));
        }
    });
}
