// What those who wait for an InferenceService make of its conditions: kstatus (Flux, kpt, helm --wait) by its own code, and
// Argo CD by the chart's health.lua, on the interpreter that Argo CD has.
package health

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	luajson "layeh.com/gopher-json"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/yaml"
)

const script = "../../charts/gantry/files/argocd/health.lua"

// The statuses are as operator/src/status.rs composes them; each file says what goes on.
var expected = map[string]struct {
	argo    string
	kstatus status.Status
	says    string
}{
	"settled":      {"Healthy", status.CurrentStatus, "pods answer"},
	"rolling":      {"Progressing", status.InProgressStatus, "Prepare of chat-"},
	"baking":       {"Progressing", status.InProgressStatus, "Bake of chat-"},
	"rejected":     {"Degraded", status.FailedStatus, "was rejected: Prompts gate"},
	"apply-failed": {"Degraded", status.FailedStatus, "forbidden"},
	"name-taken":   {"Degraded", status.FailedStatus, "does not belong to this"},
	"unseen":       {"Progressing", status.InProgressStatus, "last edit"},
	// kstatus has no word for what is switched off, and goes by Ready.
	"scaled-to-0": {"Suspended", status.InProgressStatus, "spec.replicas is 0"},
	// kstatus takes an object without conditions for one that has none.
	"new":      {"Progressing", status.CurrentStatus, "waits for the operator"},
	"deleting": {"Progressing", status.TerminatingStatus, "deleted"},
}

func read(t *testing.T, file string) *unstructured.Unstructured {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	object, err := yaml.YAMLToJSON(text)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	service := &unstructured.Unstructured{}
	if err := service.UnmarshalJSON(object); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return service
}

// Runs the script as Argo CD does: with what needs no system, and the object as `obj`.
func argo(t *testing.T, service *unstructured.Unstructured) (health, message string) {
	t.Helper()
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		if err := state.CallByParam(lua.P{Fn: state.NewFunction(open), NRet: 0, Protect: true}, lua.LString(name)); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(service)
	if err != nil {
		t.Fatal(err)
	}
	object, err := luajson.Decode(state, text)
	if err != nil {
		t.Fatal(err)
	}
	state.SetGlobal("obj", object)
	if err := state.DoFile(script); err != nil {
		t.Fatal(err)
	}
	result, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		t.Fatalf("health.lua returned %v", state.Get(-1))
	}
	return result.RawGetString("status").String(), result.RawGetString("message").String()
}

func TestStatusesAreReadAlike(t *testing.T) {
	files, err := filepath.Glob("statuses/*.yaml")
	if err != nil || len(files) != len(expected) {
		t.Fatalf("%d statuses, %d expectations: %v", len(files), len(expected), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			service, want := read(t, file), expected[name]
			health, message := argo(t, service)
			if health != want.argo || !strings.Contains(message, want.says) {
				t.Errorf("Argo CD says %s: %q", health, message)
			}
			result, err := status.Compute(service)
			if err != nil {
				t.Fatal(err)
			}
			if result.Status != want.kstatus {
				t.Errorf("kstatus says %s: %q", result.Status, result.Message)
			}
		})
	}
}

// Conditions and reasons that the operator does not know would show nothing.
func TestStatusesNameWhatTheOperatorKnows(t *testing.T) {
	source, err := os.ReadFile("../../crds/src/conditions.rs")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("statuses/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		conditions, _, err := unstructured.NestedSlice(read(t, file).Object, "status", "conditions")
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, one := range conditions {
			for _, field := range []string{"type", "reason"} {
				name, _, _ := unstructured.NestedString(one.(map[string]any), field)
				if !strings.Contains(string(source), "\n        "+name+",\n") {
					t.Errorf("%s: the operator has no %s %s", file, field, name)
				}
			}
		}
	}
}
