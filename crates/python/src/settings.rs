//! Reads the settings that `prepared_kda/settings.py` declares, and where kernels come from.

use std::path::PathBuf;

use kda_codegen::Mode;
use kda_runtime::{
    Config, DiskCache, Gate, KernelBundle, KernelSources, Policies, Policy, PolicyFile, StepKind,
    Target,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{Outcome, value};

/// Fields of `prepared_kda.Config`.
#[derive(FromPyObject)]
pub(crate) struct ConfigFields {
    heads: usize,
    conv_bias: bool,
    conv_layout: String,
    lower_bound: Option<f32>,
    gate_input: String,
    null_rule: String,
    state_dtype: String,
    rollback: String,
    ragged: bool,
    early_reads: String,
    scale: f32,
    eps: f32,
}

impl ConfigFields {
    pub(crate) fn config(&self) -> Outcome<Config> {
        Ok(Config {
            heads: self.heads,
            conv_bias: self.conv_bias,
            conv_layout: self.conv_layout.parse()?,
            gate: self.lower_bound.map_or(Gate::Softplus, Gate::LowerBound),
            gate_input: self.gate_input.parse()?,
            null_rule: self.null_rule.parse()?,
            state_dtype: self.state_dtype.parse()?,
            rollback: self.rollback.parse()?,
            ragged: self.ragged,
            early_reads: self.early_reads.parse()?,
            scale: self.scale,
            eps: self.eps,
        })
    }
}

/// Fields of `prepared_kda.Policy`.
#[derive(FromPyObject)]
pub(crate) struct PolicyFields {
    verify_tokens: usize,
    max_requests: Option<usize>,
    mode: Option<String>,
}

pub(crate) fn kind_of(verify_tokens: usize) -> StepKind {
    match verify_tokens {
        0 => StepKind::Decode,
        tokens => StepKind::Verify(tokens),
    }
}

/// A policy file by its path, or the bytes of its text.
pub(crate) fn policy_file_of(given: Option<&Bound<'_, PyAny>>) -> Outcome<Option<PolicyFile>> {
    let Some(given) = given else {
        return Ok(None);
    };
    Ok(Some(match given.cast::<PyBytes>() {
        Ok(bytes) => match std::str::from_utf8(bytes.as_bytes()) {
            Ok(text) => text.parse()?,
            Err(error) => {
                let valid = error.valid_up_to();
                let text = format!("policy_file is no UTF-8 after {valid} bytes");
                return Err(value(text));
            }
        },
        Err(_) => PolicyFile::from_path(&given.extract::<PathBuf>()?)?,
    }))
}

pub(crate) fn policies_of(
    target: Target<'_>,
    config: &Config,
    fields: &[PolicyFields],
    file: Option<&PolicyFile>,
) -> Outcome<Policies> {
    // Also where every policy names its mode and the file serves none.
    if let Some(file) = file {
        file.require_arch(target.arch())?;
    }
    let mut all = Policies::default();
    for field in fields {
        let kind = kind_of(field.verify_tokens);
        let measured = || match file {
            Some(file) => Policies::from_file(file, target, config, &[kind]),
            None => Ok(Policies::for_device(target, config, &[kind])),
        };
        let (mode, most) = match (&field.mode, field.max_requests) {
            (Some(mode), most) => (mode.parse()?, most),
            (None, None) => {
                all.0.extend(measured()?.0);
                continue;
            }
            (None, Some(most)) => (mode_for(&measured()?, most)?, Some(most)),
        };
        match most {
            None => all.0.extend(Policies::single(&[kind], mode).0),
            Some(max_requests) => all.0.push(Policy {
                kind,
                max_requests,
                mode,
            }),
        }
    }
    Ok(all)
}

/// The mode that serves `requests`.
fn mode_for(policies: &Policies, requests: usize) -> Outcome<Mode> {
    let serving = policies
        .0
        .iter()
        .find(|policy| requests <= policy.max_requests);
    serving.map(|policy| policy.mode).ok_or_else(|| {
        let most = policies.0.iter().map(|policy| policy.max_requests).max();
        let most = most.unwrap_or(0);
        value(format!(
            "max_requests is {requests}, at most {most} allowed"
        ))
    })
}

/// Where kernels come from, as keyword arguments.
pub(crate) struct SourceFields<'py> {
    pub(crate) bundle: Option<Bound<'py, PyAny>>,
    pub(crate) cache_folder: Option<PathBuf>,
    pub(crate) nvrtc_folder: Option<PathBuf>,
    pub(crate) compile: bool,
}

impl SourceFields<'_> {
    pub(crate) fn sources(self, py: Python<'_>) -> Outcome<KernelSources> {
        let mut all = KernelSources::new();
        if let Some(bundle) = self.bundle {
            all = all.bundle(match bundle.cast::<PyBytes>() {
                Ok(bytes) => KernelBundle::from_bytes(bytes.as_bytes().to_vec())?,
                Err(_) => KernelBundle::from_path(&bundle.extract::<PathBuf>()?)?,
            });
        }
        all = match self.cache_folder {
            Some(folder) if folder.as_os_str() == "off" => all,
            Some(folder) => all.disk_cache(DiskCache::at(folder)),
            None => all.disk_cache(DiskCache::from_environment()),
        };
        if self.compile {
            all = all.nvrtc(&nvrtc_folders(py, self.nvrtc_folder)?);
        }
        Ok(all)
    }
}

/// Where to look for libnvrtc first: the given folder, else this interpreter's packages, which the
/// library finds only through `PATH` and `VIRTUAL_ENV`. A library that the environment names goes
/// before them.
pub(crate) fn nvrtc_folders(py: Python<'_>, given: Option<PathBuf>) -> Outcome<Vec<PathBuf>> {
    if let Some(folder) = given {
        return Ok(vec![folder]);
    }
    if std::env::var_os(kda_codegen::nvrtc::LIBRARY_VARIABLE).is_some() {
        return Ok(Vec::new());
    }
    let path = py.import("sys")?.getattr("path")?;
    let mut folders = Vec::new();
    for entry in path.try_iter()? {
        let Ok(entry) = entry?.extract::<PathBuf>() else {
            continue;
        };
        for package in ["cu13", "cuda_nvrtc"] {
            let folder = entry.join("nvidia").join(package).join("lib");
            if folder.is_dir() {
                folders.push(folder);
            }
        }
    }
    Ok(folders)
}
