//! What identifies a kernel: every value that its code depends on, by name. Knows no file and no
//! library.

use std::fmt::{self, Write as _};

use kda_codegen::{KernelSpec, nvrtc, source};
use sha2::{Digest, Sha256};

use crate::Error;

/// Version of this crate, part of every key.
pub(crate) const CRATE_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Bytes of a digest.
pub(crate) const DIGEST_BYTES: usize = 32;

/// A SHA-256 digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Hash(pub(crate) [u8; DIGEST_BYTES]);

impl Hash {
    pub(crate) fn of(bytes: &[u8]) -> Hash {
        Hash(Sha256::digest(bytes).into())
    }

    pub(crate) fn hex(&self) -> String {
        self.0
            .iter()
            .fold(String::with_capacity(2 * DIGEST_BYTES), |mut text, byte| {
                let _ = write!(text, "{byte:02x}");
                text
            })
    }
}

/// Digest of everything that a kernel's code depends on: specialisation, architecture, text,
/// options, crate version and NVRTC version. Written as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelKey(Hash);

impl fmt::Display for KernelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.hex())
    }
}

/// A named value that a kernel's code depends on.
pub(crate) type Field = (&'static str, String);

/// How many leading fields of [`Identity::fields`] are the specialisation's.
pub(crate) const SPEC_FIELDS: usize = 15;

/// A kernel before it is compiled.
pub(crate) struct Identity {
    pub(crate) spec: KernelSpec,
    pub(crate) entry: String,
    /// The specialisation's fields, then crate version, options and text.
    pub(crate) fields: Vec<Field>,
}

impl Identity {
    pub(crate) fn new(spec: &KernelSpec) -> Result<Identity, Error> {
        let source = source::render(spec)?;
        // Destructured in full: a new field demands a decision here.
        let KernelSpec {
            role,
            arch,
            heads,
            tokens,
            verify,
            ragged,
            rollback,
            conv_bias,
            conv_layout,
            gate,
            gate_input,
            null_rule,
            state_dtype,
            early_reads,
            mode,
        } = spec;
        let specialisation: [Field; SPEC_FIELDS] = [
            ("role", role.to_string()),
            ("arch", arch.to_string()),
            ("heads", heads.to_string()),
            ("tokens", tokens.to_string()),
            ("verify", verify.to_string()),
            ("ragged", ragged.to_string()),
            ("rollback", rollback.to_string()),
            ("conv_bias", conv_bias.to_string()),
            ("conv_layout", conv_layout.to_string()),
            ("gate", gate.to_string()),
            ("gate_input", gate_input.to_string()),
            ("null_rule", null_rule.to_string()),
            ("state_dtype", state_dtype.to_string()),
            ("early_reads", early_reads.to_string()),
            ("mode", mode.to_string()),
        ];
        let mut fields = Vec::from(specialisation);
        fields.push(("crate_version", CRATE_VERSION.into()));
        fields.push(("options", nvrtc::options(spec).join(" ")));
        fields.push(("text_sha256", Hash::of(source.text.as_bytes()).hex()));
        Ok(Identity {
            spec: *spec,
            entry: source.entry,
            fields,
        })
    }

    /// Digest of the fields: the key without the NVRTC version.
    pub(crate) fn base(&self) -> Hash {
        digest(&self.fields)
    }

    /// The key of the kernel that this NVRTC makes.
    pub(crate) fn key(&self, (major, minor): (i32, i32)) -> KernelKey {
        let mut fields = self.fields.clone();
        fields.push(("nvrtc", format!("{major}.{minor}")));
        KernelKey(digest(&fields))
    }
}

fn digest(fields: &[Field]) -> Hash {
    let mut hasher = Sha256::new();
    for (name, value) in fields {
        // Lengths keep neighbours apart.
        for text in [name, value.as_str()] {
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    Hash(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kda_codegen::Arch;

    #[test]
    fn every_field_changes_the_key() {
        let identity = Identity::new(&KernelSpec::new(Arch::Sm90a, 12)).unwrap();
        let key = identity.key((13, 0));
        assert_ne!(key, identity.key((13, 1)), "nvrtc");
        for i in 0..identity.fields.len() {
            let mut other = Identity::new(&identity.spec).unwrap();
            other.fields[i].1.push('x');
            assert_ne!(key, other.key((13, 0)), "{}", identity.fields[i].0);
            assert_ne!(identity.base(), other.base(), "{}", identity.fields[i].0);
        }
        assert_eq!(key, Identity::new(&identity.spec).unwrap().key((13, 0)));
    }

    #[test]
    fn a_digest_keeps_neighbours_apart() {
        let fields = |a: &str, b: &str| digest(&[("a", a.into()), ("b", b.into())]);
        assert_ne!(fields("12", "3"), fields("1", "23"));
    }
}
