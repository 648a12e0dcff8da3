"""scikit-learn estimators: classification, regression and uncertainty of tabular data.

python examples/sklearn_estimators.py      a few seconds on a laptop
"""

from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from featureflock.integrations import FlockClassifier, FlockRegressor

X, y = load_breast_cancer(return_X_y=True, as_frame=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0, stratify=y)
model = FlockClassifier(members=5, epochs=50, random_state=0).fit(X_train, y_train)
total, aleatoric, epistemic = model.predict_uncertainty(X_test)
wrong = model.predict(X_test) != y_test
print(f"accuracy {100 * model.score(X_test, y_test):.1f} %, NLL {log_loss(y_test, model.predict_proba(X_test)):.3f}")
print(f"mean uncertainty {total[wrong].mean():.2f} nats if wrong, {total[~wrong].mean():.2f} if correct")

X, y = load_diabetes(return_X_y=True, as_frame=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
regressor = FlockRegressor(members=5, epochs=50, random_state=0).fit(X_train, y_train)
mean, std = regressor.predict(X_test, return_std=True)
print(f"R² {regressor.score(X_test, y_test):.2f}; {100 * (abs(y_test - mean) < 2 * std).mean():.0f} % within 2 std")
