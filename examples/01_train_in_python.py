"""Trains the model of the quickstart from Python, and plots its reward.

Run it cell by cell in an editor that knows `# %%`, paste it into a notebook, or run it whole, in the repository:
`python examples/01_train_in_python.py`.
"""

# %% Train
import asyncrl

OVERRIDES = {"run.name": "from-python", "learner.total_steps": 60}


def show(step: asyncrl.StepRecord) -> None:
    print(f"step {step.step + 1}: {step.trained_samples} samples, mean reward {step.reward_mean:.3f}")


result = asyncrl.run("quickstart", OVERRIDES, on_step=show, progress=False)

# %% Plot the reward
for step in result.steps:
    print(f"{step.step + 1:4} {'█' * round(50 * (step.reward_mean or 0))} {step.reward_mean:.3f}")

# %% Where to go on
print(f"held-out reward: {[f'{each.reward_mean:.3f}' for each in result.evals]}")
print(f"weights: {result.weights}")
print(f"all curves: {result.directory / 'report.html'}")
